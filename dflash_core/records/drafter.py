"""From the training run to the served folder."""

from typing import Literal

from dflash_core.records.base import Record, StoredObject

LEAST_PROMPTS = 8
"""With fewer, an interval that says 95 % holds the truth less than 90 times in 100 (5: 85, 3: 76, 2: 58; 16: 94)."""


class FileCoverage(Record):
    """What a training run took from one source file."""

    partition: str
    rows: int
    tokens: int
    blocks: int
    mean_loss: float
    joint_accepted_prefix: float
    """Mean over blocks of the length of the all-correct prefix, plus one (the anchor)."""


class DrafterCheckpoint(Record):
    """A finished training run; written last under drafter_checkpoint/<run>/manifest.json."""

    run: str
    recipe: str
    code_version: str
    training_set: str
    """Hash of the training set."""
    gate: Literal["passed", "accepted although failed"]
    target_fingerprint: str
    tokenizer_sha256: str
    """Of the tokenizer.json that the training's token ids come from."""
    steps: int
    train_s: float
    """Seconds in the training loop over all attempts, model loading excluded."""
    final_loss: float
    held_out_accepted_prefix: float
    """Of the published weights."""
    weights: StoredObject
    """fp32 masters, safetensors."""
    config: StoredObject
    """config.json in the published form."""
    metrics: StoredObject
    """JSON lines, one a step."""
    coverage: tuple[FileCoverage, ...]
    skipped_steps: int
    skipped_rows: int
    settings: StoredObject | None = None
    """The whole recipe that it was trained with but for its secrets, JSON; None: made before it was kept."""
    curve: StoredObject | None = None
    """The learning curve, PNG."""
    published_step: int | None = None
    """After which step the weights were taken; None: after the last."""
    best_step: int = 0
    """The step with the longest held-out accepted prefix among those that were validated and saved; 0: none was."""
    best_accepted_prefix: float = 0.0


class RunPointer(Record):
    """drafter_checkpoint/latest.json: the run that was finished last; written after everything it leads to."""

    run: str


class SavedStep(Record):
    """A checkpoint of a run under way, drafter_checkpoint/<run>/checkpoints/<step>.json; written after its files."""

    run: str
    step: int
    files: tuple[StoredObject, ...]


CutKind = Literal["file", "folder", "temperature", "thinking"]


class AcceptanceCut(Record):
    """Acceptance on a part of the prompts, or under another setting; intervals are 95 %, bootstrapped over prompts.

    None in place of an interval: too few prompts for one.
    """

    cut: CutKind
    name: str
    prompts: int
    verification_steps: int
    acceptance_length: float
    interval: tuple[float, float] | None
    acceptance_length_ngram: float | None = None
    acceptance_length_no_features: float | None = None


class StopExample(Record):
    """A verification step in which a proposal fell, as text."""

    file: str
    row_id: str
    before: str
    accepted: str
    refused: str
    """What the drafter proposed."""
    said: str
    """What the target said in its place."""


class PreviousDrafter(Record):
    """The comparison with the drafter that was evaluated before this one for the same target."""

    verdict: Literal["better", "no worse", "worse", "skipped"]
    """Worse and better are beyond noise: the interval of the difference does not hold 0."""
    reason: str
    run: str | None = None
    acceptance_length: float | None = None
    difference: float | None = None
    """Of acceptance lengths, ours minus theirs, on the same prompts."""
    interval: tuple[float, float] | None = None


class DrafterEval(Record):
    """Acceptance measured by draft-and-verify decoding; drafter_eval/<run>/report.json.

    Intervals are 95 %, bootstrapped over prompts; None: fewer than `LEAST_PROMPTS`.
    """

    run: str
    target_fingerprint: str
    dtype: str
    """The target's."""
    prompts: int
    prompts_sha256: str
    prompt_files: tuple[str, ...]
    """The source file of each prompt."""
    temperature: float
    block_size: int
    lossless: bool
    """Output with the drafter equals the output without, token by token (meaningful at temperature 0)."""
    differing_prompts: int
    """Prompts whose outputs differ; in reduced precision near ties make some."""
    acceptance_length: float
    """1 + accepted drafts / verification steps, over all steps: what serving engines report."""
    acceptance_interval: tuple[float, float] | None
    acceptance_length_per_prompt: tuple[float, ...]
    """1.0 where the first token already ended the response, so that nothing was verified."""
    acceptance_length_response_mean: float
    """The mean of those that had a verification step: each response counts once, however long; 1.0: none had."""
    responses_without_steps: int = 0
    """Prompts left out of that mean."""
    verification_steps_per_prompt: tuple[int, ...]
    acceptance_length_ngram: float
    acceptance_interval_ngram: tuple[float, float] | None
    acceptance_length_no_features: float
    acceptance_interval_no_features: tuple[float, float] | None
    conditional_acceptance: tuple[float, ...]
    """Share of slot k accepted given that slots 1..k-1 were; K-1 values."""
    tokens: int
    verification_steps: int
    histogram: tuple[int, ...]
    """Verification steps that accepted 0, 1, ... K-1 drafts; K values."""
    timed_prompts: int
    """Decoded one at a time, with and without the drafter in turn; the speeds are theirs."""
    tokens_per_s: float
    tokens_per_s_without: float
    speed_up: float
    speed_up_interval: tuple[float, float] | None
    cuts: tuple[AcceptanceCut, ...]
    skipped_cuts: dict[str, str]
    """Cut -> why it could not be made."""
    stops: dict[str, int]
    """Token that the target said in place of a fallen proposal -> how often, the most frequent ones."""
    examples: tuple[StopExample, ...]
    previous: PreviousDrafter
    picture: StoredObject
    markdown: StoredObject
    settings: str
    """sha256 over everything that decides these numbers; an equal one makes a new evaluation needless."""


class DrafterExport(Record):
    """An exported drafter folder; drafter_export/<run>/manifest.json, written last, and the same next to the files."""

    run: str
    training_set: str
    target_fingerprint: str
    tokenizer_sha256: str
    dtype: str
    files: tuple[StoredObject, ...]


class ServeCheck(Record):
    """A server's acceptance and our decoder's, on the same prompts; drafter_eval/<run>/serve_check.json."""

    run: str
    url: str
    model: str
    prompts: int
    block_size: int
    """As served: the anchor and the proposed tokens."""
    compared: int
    """Outputs whose token ids could be compared."""
    differences: tuple[str, ...]
    """One sentence for each output that differs."""
    served_histogram: tuple[int, ...]
    """Verification steps that accepted 0, 1, ... K-1 drafts, by the server's counters."""
    decoded_histogram: tuple[int, ...]
    """The same by our decoder."""
    served_acceptance_length: float
    decoded_acceptance_length: float
    agrees: bool
    """The acceptance lengths are equal within the tolerance."""
    verdict: str
