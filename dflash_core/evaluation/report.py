"""From what was decoded to the numbers of the report: acceptance, its cuts, where drafting stops, better or worse.

The trade-off of the comparison with the drafter before: only paired numbers count (the same prompts under the same
settings), since the spread between prompts is larger than any difference worth seeing. Where they cannot be paired, or
are too few, the comparison is skipped, and says why.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from dflash_core.decoding.acceptance import (
    StepCounts,
    acceptance_interval,
    acceptance_length,
    add_histograms,
    bootstrap,
    conditional_acceptance,
    counts_of,
    difference_interval,
    length_of,
)
from dflash_core.decoding.decode import DecodedAnswer
from dflash_core.decoding.prompts import HeldOutPrompt
from dflash_core.errors import ObjectMissing
from dflash_core.evaluation.held_out import Subject
from dflash_core.evaluation.measure import Decodings, Rivals
from dflash_core.records import (
    LEAST_PROMPTS,
    AcceptanceCut,
    CutKind,
    DrafterCheckpoint,
    DrafterEval,
    PreviousDrafter,
    RunPointer,
    StopExample,
    StoredObject,
)
from dflash_core.reports.sentences import Interval
from dflash_core.storage.layout import RunKeys, latest_evaluation
from dflash_core.storage.partitions import object_key
from dflash_core.storage.s3 import Store

STOP_EXAMPLES, STOPS_LISTED = 8, 12
BEFORE_TOKENS = 32
"""Of an example, shown before the block."""
NOTHING_STORED = StoredObject(key="", size=0, sha256="")
"""Stands for picture and Markdown until they are made from the numbers."""


@dataclass(frozen=True)
class Origin:
    """What the report is about, besides the decodings."""

    checkpoint: DrafterCheckpoint
    settings: str
    no_thinking_cut: str | None
    """Why the prompts have no thinking switch."""
    previous: DrafterEval | None


def assemble(subject: Subject, decoded: Decodings, origin: Origin) -> DrafterEval:
    """All numbers; picture and Markdown are still missing."""
    settings, main = subject.recipe.evaluation, decoded.main
    histograms = [g.histogram for g in main.drafter]
    histogram, counts = add_histograms(histograms), counts_of(histograms)
    ngram, blind = (counts_of([g.histogram for g in made]) for made in (main.ngram, main.no_features))
    differing = sum(a.tokens != b.tokens for a, b in zip(main.drafter, decoded.plain, strict=True))
    verified = [acceptance_length(h) for h in histograms if sum(h)]
    timed = slice(0, decoded.timed)
    speeds = _speeds(main.drafter[timed], decoded.plain[timed])
    cuts, skipped = _cuts(decoded, counts, origin)
    hashed = prompts_hash(subject, decoded)
    return DrafterEval(
        run=origin.checkpoint.run,
        target_fingerprint=origin.checkpoint.target_fingerprint,
        dtype=subject.recipe.target.dtype,
        prompts=len(decoded.prompts),
        prompts_sha256=hashed,
        prompt_files=tuple(prompt.file for prompt in decoded.prompts),
        temperature=settings.temperature,
        block_size=main.drafter[0].block_size,
        lossless=settings.temperature == 0 and not differing,
        differing_prompts=differing,
        acceptance_length=acceptance_length(histogram),
        acceptance_interval=acceptance_interval(counts),
        acceptance_length_per_prompt=tuple(acceptance_length(h) for h in histograms),
        acceptance_length_response_mean=sum(verified) / len(verified) if verified else 1.0,
        responses_without_steps=len(histograms) - len(verified),
        verification_steps_per_prompt=tuple(sum(h) for h in histograms),
        acceptance_length_ngram=length_of(ngram),
        acceptance_interval_ngram=acceptance_interval(ngram),
        acceptance_length_no_features=length_of(blind),
        acceptance_interval_no_features=acceptance_interval(blind),
        conditional_acceptance=conditional_acceptance(histogram),
        tokens=sum(len(g.tokens) for g in main.drafter),
        verification_steps=sum(histogram),
        histogram=histogram,
        timed_prompts=decoded.timed,
        tokens_per_s=speeds.ours,
        tokens_per_s_without=speeds.plain,
        speed_up=speeds.ours / speeds.plain,
        speed_up_interval=speeds.interval,
        cuts=tuple(cuts),
        skipped_cuts=skipped,
        stops=frequent_stops(subject.tokenizer.reference, main.drafter),
        examples=stop_examples(subject.tokenizer.reference, decoded.prompts, main.drafter),
        previous=compare(counts, hashed, origin.previous),
        picture=NOTHING_STORED,
        markdown=NOTHING_STORED,
        settings=origin.settings,
    )


def prompts_hash(subject: Subject, decoded: Decodings) -> str:
    """sha256 over the prompts and how they were decoded: equal ones give numbers that can be paired."""
    settings = subject.recipe.evaluation
    block_size = decoded.main.drafter[0].block_size
    how = [settings.temperature, settings.max_new_tokens, block_size, subject.recipe.target.dtype]
    return hashlib.sha256(json.dumps([how, [p.ids for p in decoded.prompts]]).encode()).hexdigest()


@dataclass(frozen=True)
class _Speeds:
    ours: float
    plain: float
    interval: Interval | None


def _speeds(ours: Sequence[DecodedAnswer], plain: Sequence[DecodedAnswer]) -> _Speeds:
    """Tokens a second with and without the drafter, and the interval of their ratio."""
    tokens = np.array([[len(a.tokens), len(b.tokens)] for a, b in zip(ours, plain, strict=True)], np.float64)
    seconds = np.array([[a.seconds, b.seconds] for a, b in zip(ours, plain, strict=True)]) + 1e-9

    def ratio(chosen: NDArray[np.int64]) -> StepCounts:
        rates = tokens[chosen].sum(1) / seconds[chosen].sum(1)
        return np.asarray(rates[:, 0] / np.maximum(rates[:, 1], 1e-9), np.float64)

    with_drafter, without = tokens.sum(0) / seconds.sum(0)
    return _Speeds(float(with_drafter), float(without), bootstrap(len(tokens), ratio))


def _cuts(decoded: Decodings, counts: StepCounts, origin: Origin) -> tuple[list[AcceptanceCut], dict[str, str]]:
    """By file, by folder, by temperature, by thinking state; and why one is missing."""
    skipped: dict[str, str] = {}
    files = [prompt.file for prompt in decoded.prompts]
    cuts = [_part("file", name, counts, [f == name for f in files]) for name in sorted(set(files))]
    folders = [object_key(file, "").rpartition("/")[0] for file in files]
    if len(set(folders)) > 1:
        cuts += [_part("folder", name, counts, [f == name for f in folders]) for name in sorted(set(folders))]
    else:
        skipped["folder"] = "all source files are in one folder"
    cuts += [_temperature(temperature, rivals) for temperature, rivals in decoded.temperatures.items()]
    for state, answers in decoded.thinking.items():
        if answers:
            cuts.append(_cut("thinking", state, counts_of([g.histogram for g in answers])))
        else:
            skipped[f"thinking {state}"] = "no prompt"
    if not decoded.thinking:
        skipped["thinking"] = origin.no_thinking_cut or "no prompt ends as the chat template ends one"
    return cuts, skipped


def _part(kind: CutKind, name: str, counts: StepCounts, member: list[bool]) -> AcceptanceCut:
    return _cut(kind, name or "(top)", counts[np.array(member)])


def _temperature(temperature: float, rivals: Rivals) -> AcceptanceCut:
    ngram, blind = (counts_of([g.histogram for g in made]) for made in (rivals.ngram, rivals.no_features))
    return _cut("temperature", f"{temperature:g}", counts_of([g.histogram for g in rivals.drafter])).model_copy(
        update={"acceptance_length_ngram": length_of(ngram), "acceptance_length_no_features": length_of(blind)}
    )


def _cut(kind: CutKind, name: str, counts: StepCounts) -> AcceptanceCut:
    return AcceptanceCut(
        cut=kind,
        name=name,
        prompts=len(counts),
        verification_steps=int(counts[:, 1].sum()),
        acceptance_length=length_of(counts),
        interval=acceptance_interval(counts),
    )


def find_previous(store: Store, run: str, target_fingerprint: str) -> DrafterEval | None:
    """The evaluation before that of `run` for this target: each names its predecessor, the pointer names the last."""
    try:
        name: str | None = store.get_record(latest_evaluation(target_fingerprint), RunPointer).run
    except ObjectMissing:
        return None
    seen = set[str]()
    while name is not None and name not in seen:
        seen.add(name)
        report = store.find_record(RunKeys(name).report, DrafterEval)
        if report is None or report.target_fingerprint != target_fingerprint:
            return None
        if name != run:
            return report
        name = report.previous.run
    return None


def compare(ours: StepCounts, prompts_sha256: str, previous: DrafterEval | None) -> PreviousDrafter:
    """Ours against the previous drafter's, prompt by prompt.

    Args:
        ours: counts of the new drafter.
        prompts_sha256: hash of prompts and settings of decoding.
        previous: None: there is none.
    """
    if previous is None:
        return PreviousDrafter(verdict="skipped", reason="no other drafter of this target has been evaluated")
    if previous.prompts_sha256 != prompts_sha256:
        return PreviousDrafter(
            verdict="skipped",
            reason=f"run {previous.run} was evaluated on other prompts or settings ({previous.prompts} prompts with "
            f"hash {previous.prompts_sha256[:12]}, now {len(ours)} with {prompts_sha256[:12]})",
            run=previous.run,
            acceptance_length=previous.acceptance_length,
        )
    steps = np.array(previous.verification_steps_per_prompt, np.float64)
    theirs = np.stack([(np.array(previous.acceptance_length_per_prompt) - 1) * steps, steps], 1)
    interval = difference_interval(ours, theirs)
    difference = length_of(ours) - length_of(theirs)
    if interval is None:
        return PreviousDrafter(
            verdict="skipped",
            reason=f"{difference:+.2f} against run {previous.run}, but {len(ours)} prompts are too few to tell it from "
            f"noise ({LEAST_PROMPTS} are needed)",
            run=previous.run,
            acceptance_length=previous.acceptance_length,
            difference=difference,
        )
    low, high = interval
    return PreviousDrafter(
        verdict="worse" if high < 0 else "better" if low > 0 else "no worse",
        reason=f"{difference:+.2f} ({low:+.2f} to {high:+.2f}) against run {previous.run} on the same {len(ours)} "
        "prompts",
        run=previous.run,
        acceptance_length=previous.acceptance_length,
        difference=difference,
        interval=interval,
    )


class Stop(NamedTuple):
    """A fallen proposal in an answer."""

    anchor: int
    """Index of the block's slot 0 in the answer's tokens."""
    accepted: int
    refused: int
    said: int


def stops_of(answer: DecodedAnswer) -> Iterator[Stop]:
    """Every step of which a proposal fell, but for what the end of the output has cut off."""
    anchor = 0
    for step in answer.steps:
        at = anchor + step.accepted + 1
        if step.refused is not None and at < len(answer.tokens):
            yield Stop(anchor, step.accepted, step.refused, answer.tokens[at])
        anchor = at


def frequent_stops(tokenizer: Tokenizer, answers: Sequence[DecodedAnswer]) -> dict[str, int]:
    """Tokens that the target said where a proposal fell, the most frequent first."""
    counted = Counter(stop.said for answer in answers for stop in stops_of(answer))
    best = sorted(counted.items(), key=lambda item: (-item[1], item[0]))[:STOPS_LISTED]
    return {_text(tokenizer, [token]): count for token, count in best}


def stop_examples(
    tokenizer: Tokenizer, prompts: Sequence[HeldOutPrompt], answers: Sequence[DecodedAnswer]
) -> tuple[StopExample, ...]:
    """Of each of the first prompts the step that accepted least."""
    examples: list[StopExample] = []
    for prompt, answer in zip(prompts, answers, strict=True):
        worst = min(stops_of(answer), key=lambda stop: stop.accepted, default=None)
        if worst is None or len(examples) == STOP_EXAMPLES:
            continue
        known = [*prompt.ids, *answer.tokens[: worst.anchor + 1]]
        accepted = answer.tokens[worst.anchor + 1 : worst.anchor + 1 + worst.accepted]
        examples.append(
            StopExample(
                file=prompt.file,
                row_id=prompt.row_id,
                before=_text(tokenizer, known[-BEFORE_TOKENS:]),
                accepted=_text(tokenizer, accepted),
                refused=_text(tokenizer, [worst.refused]),
                said=_text(tokenizer, [worst.said]),
            )
        )
    return tuple(examples)


def _text(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(ids), skip_special_tokens=False))
