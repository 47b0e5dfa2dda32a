"""From what was decoded to the numbers of the report."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dflash_core.evaluation.acceptance import (
    Counts,
    Interval,
    acceptance_interval,
    acceptance_length,
    add,
    bootstrap,
    conditional_acceptance,
    counts_of,
    length_of,
)
from dflash_core.evaluation.decode import Generation
from dflash_core.evaluation.measure import Measured, Rivals
from dflash_core.evaluation.previous import compare
from dflash_core.evaluation.stops import frequent_stops, stop_examples
from dflash_core.evaluation.subject import Subject
from dflash_core.records import AcceptanceCut, CutKind, DrafterCheckpoint, DrafterEval, StoredObject
from dflash_core.storage.keys import object_key

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


def assemble(subject: Subject, measured: Measured, origin: Origin) -> DrafterEval:
    """All numbers; picture and Markdown are still missing."""
    settings, main = subject.recipe.evaluation, measured.main
    histograms = [g.histogram for g in main.drafter]
    histogram, counts = add(histograms), counts_of(histograms)
    ngram, blind = (counts_of([g.histogram for g in made]) for made in (main.ngram, main.no_features))
    differing = sum(a.tokens != b.tokens for a, b in zip(main.drafter, measured.plain, strict=True))
    verified = [acceptance_length(h) for h in histograms if sum(h)]
    timed = slice(0, measured.timed)
    speeds = _speeds(main.drafter[timed], measured.plain[timed])
    cuts, skipped = _cuts(measured, counts, origin)
    hashed = prompts_hash(subject, measured)
    return DrafterEval(
        run=origin.checkpoint.run,
        target_fingerprint=origin.checkpoint.target_fingerprint,
        dtype=subject.recipe.target.dtype,
        prompts=len(measured.prompts),
        prompts_sha256=hashed,
        prompt_files=tuple(prompt.file for prompt in measured.prompts),
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
        timed_prompts=measured.timed,
        tokens_per_s=speeds.ours,
        tokens_per_s_without=speeds.plain,
        speed_up=speeds.ours / speeds.plain,
        speed_up_interval=speeds.interval,
        cuts=tuple(cuts),
        skipped_cuts=skipped,
        stops=frequent_stops(subject.tokenizer.reference, main.drafter),
        examples=stop_examples(subject.tokenizer.reference, measured.prompts, main.drafter),
        previous=compare(counts, hashed, origin.previous),
        picture=NOTHING_STORED,
        markdown=NOTHING_STORED,
        settings=origin.settings,
    )


def prompts_hash(subject: Subject, measured: Measured) -> str:
    """sha256 over the prompts and how they were decoded: equal ones give numbers that can be paired."""
    settings = subject.recipe.evaluation
    block_size = measured.main.drafter[0].block_size
    how = [settings.temperature, settings.max_new_tokens, block_size, subject.recipe.target.dtype]
    return hashlib.sha256(json.dumps([how, [p.ids for p in measured.prompts]]).encode()).hexdigest()


@dataclass(frozen=True)
class _Speeds:
    ours: float
    plain: float
    interval: Interval | None


def _speeds(ours: Sequence[Generation], plain: Sequence[Generation]) -> _Speeds:
    """Tokens a second with and without the drafter, and the interval of their ratio."""
    tokens = np.array([[len(a.tokens), len(b.tokens)] for a, b in zip(ours, plain, strict=True)], np.float64)
    seconds = np.array([[a.seconds, b.seconds] for a, b in zip(ours, plain, strict=True)]) + 1e-9

    def ratio(chosen: NDArray[np.int64]) -> Counts:
        rates = tokens[chosen].sum(1) / seconds[chosen].sum(1)
        return np.asarray(rates[:, 0] / np.maximum(rates[:, 1], 1e-9), np.float64)

    with_drafter, without = tokens.sum(0) / seconds.sum(0)
    return _Speeds(float(with_drafter), float(without), bootstrap(len(tokens), ratio))


def _cuts(measured: Measured, counts: Counts, origin: Origin) -> tuple[list[AcceptanceCut], dict[str, str]]:
    """By file, by folder, by temperature, by thinking state; and why one is missing."""
    skipped: dict[str, str] = {}
    files = [prompt.file for prompt in measured.prompts]
    cuts = [_part("file", name, counts, [f == name for f in files]) for name in sorted(set(files))]
    folders = [object_key(file, "").rpartition("/")[0] for file in files]
    if len(set(folders)) > 1:
        cuts += [_part("folder", name, counts, [f == name for f in folders]) for name in sorted(set(folders))]
    else:
        skipped["folder"] = "all source files lie in one folder"
    cuts += [_temperature(temperature, rivals) for temperature, rivals in measured.temperatures.items()]
    for state, generations in measured.thinking.items():
        if generations:
            cuts.append(_cut("thinking", state, counts_of([g.histogram for g in generations])))
        else:
            skipped[f"thinking {state}"] = "no prompt"
    if not measured.thinking:
        skipped["thinking"] = origin.no_thinking_cut or "no prompt ends as the chat template ends one"
    return cuts, skipped


def _part(kind: CutKind, name: str, counts: Counts, member: list[bool]) -> AcceptanceCut:
    return _cut(kind, name or "(top)", counts[np.array(member)])


def _temperature(temperature: float, rivals: Rivals) -> AcceptanceCut:
    ngram, blind = (counts_of([g.histogram for g in made]) for made in (rivals.ngram, rivals.no_features))
    return _cut("temperature", f"{temperature:g}", counts_of([g.histogram for g in rivals.drafter])).model_copy(
        update={"acceptance_length_ngram": length_of(ngram), "acceptance_length_no_features": length_of(blind)}
    )


def _cut(kind: CutKind, name: str, counts: Counts) -> AcceptanceCut:
    return AcceptanceCut(
        cut=kind,
        name=name,
        prompts=len(counts),
        verification_steps=int(counts[:, 1].sum()),
        acceptance_length=length_of(counts),
        interval=acceptance_interval(counts),
    )
