"""The records that travel between stages and into manifests: frozen, JSON in and out, no behaviour beyond that."""

from typing import Literal

from pydantic import BaseModel, ConfigDict


class Record(BaseModel):
    """Base of everything written to S3 as JSON. Unknown fields are refused: a newer manifest is not half-read."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class StoredObject(Record):
    """One object below the storage prefix, as a manifest names it. Readers verify size and sha256."""

    key: str
    """Relative to the storage prefix."""
    size: int
    sha256: str


class SourceFile(Record):
    """One object with completions, as listed."""

    partition: str
    """Partition key: the encoded path below the source prefix."""
    key: str
    """Full object key in the source bucket."""
    uri: str
    etag: str
    size: int


class Reject(Record):
    """One input row that is not in the shard, and why. `line` counts from 1."""

    line: int
    reason: str
    detail: str = ""


class ShardManifest(Record):
    """What one source file became; written last, so its presence means that everything it names is whole."""

    fingerprint: str
    code_version: str
    source: SourceFile
    source_sha256: str
    shard: StoredObject
    statistics: StoredObject
    rejects: StoredObject
    rows_read: int
    rows_kept: int
    rows_rejected: int
    reject_reasons: dict[str, int]
    tokens: int
    supervised_tokens: int


class GeneratedFile(Record):
    """What one file of prompts became; generated_completions/<partition>/manifest.json, written last.

    lines = written + sum(dropped): every line of the prompts is in the completions or has its reason.
    """

    partition: str
    request_hash: str
    """Of everything but the prompts that decides the answers."""
    policy_hash: str
    """Of what decides which answers are kept."""
    prompts: SourceFile
    prompts_sha256: str
    model: str
    servers: tuple[str, ...]
    completions: StoredObject
    """Its key is relative to the source's prefix."""
    completions_uri: str
    rejects: StoredObject
    """Every dropped line with its reason, JSON lines."""
    lines: int
    written: int
    dropped: dict[str, int]
    """Reason -> lines."""
    outcomes: dict[str, int]
    """Outcome -> prompts, whatever the policy made of them."""
    cut_in_thought: int
    """Of the truncated ones."""
    asked: int
    """Requests answered in this run; the others were answered in earlier ones."""
    prompt_tokens: int
    completion_tokens: int
    completion_histogram: dict[int, int]
    """Completion tokens -> written rows."""
    answer_seconds: dict[int, int]
    """Seconds an answer took, rounded up -> written rows."""
    seconds: float
    """Of this run."""


class Verdict(Record):
    """What the gate said. Reasons name files, rows and numbers."""

    passed: bool
    reasons: tuple[str, ...]


class TrainingSetShard(Record):
    """One file's part of a training set."""

    partition: str
    source_uri: str
    source_etag: str
    source_sha256: str
    shard: StoredObject
    rows: int
    tokens: int
    supervised_tokens: int


class TrainingSet(Record):
    """A frozen selection of shards plus the gate's verdict on them. `hash` is the sha256 of everything else in here."""

    hash: str
    recipe: str
    fingerprint: str
    shards: tuple[TrainingSetShard, ...]
    """Sorted by partition."""
    missing: tuple[str, ...]
    """Partitions of the source that have no valid shard, or one without a row."""
    coverage: float
    rows_read: int
    rows_kept: int
    rows_rejected: int
    reject_reasons: dict[str, int]
    tokens: int
    supervised_tokens: int
    statistics: StoredObject
    """The merged statistics of all files."""
    verdict: Verdict


class TrainingSetPointer(Record):
    """training_set/latest.json: the set that was frozen last; written after everything it leads to."""

    hash: str


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
    weights: StoredObject
    """fp32 masters, safetensors."""
    config: StoredObject
    """config.json in the published form."""
    metrics: StoredObject
    """JSON lines, one a step."""
    coverage: tuple[FileCoverage, ...]
    skipped_steps: int
    skipped_rows: int
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
    """Acceptance on a part of the prompts, or under another setting; intervals are 95 %, bootstrapped over prompts."""

    cut: CutKind
    name: str
    prompts: int
    verification_steps: int
    acceptance_length: float
    interval: tuple[float, float]
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

    Intervals are 95 %, bootstrapped over prompts.
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
    acceptance_interval: tuple[float, float]
    acceptance_length_per_prompt: tuple[float, ...]
    acceptance_length_response_mean: float
    """The mean of those: each response counts once, however long."""
    verification_steps_per_prompt: tuple[int, ...]
    acceptance_length_ngram: float
    acceptance_interval_ngram: tuple[float, float]
    acceptance_length_no_features: float
    acceptance_interval_no_features: tuple[float, float]
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
    speed_up_interval: tuple[float, float]
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
    """An exported drafter folder; drafter_export/<run>/manifest.json, written last, and the same beside the files."""

    run: str
    training_set: str
    target_fingerprint: str
    tokenizer_sha256: str
    dtype: str
    files: tuple[StoredObject, ...]


class ServeCheck(Record):
    """A server's acceptance beside our decoder's, on the same prompts; drafter_eval/<run>/serve_check.json."""

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


class CommandFailure(Record):
    """What a core command writes instead of its result when it refuses."""

    error: str
