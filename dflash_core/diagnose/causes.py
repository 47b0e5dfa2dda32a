"""The known causes of low acceptance, each an experiment on the same prompts: what if it were otherwise?

Causes in the drafter's config, or in how it is fed, are lists of assumptions, all measured at once on recorded text.
Causes in what it was trained on (other prompts, other answers, or shorter ones than are served) compare decodings.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from dflash_core.decoding.acceptance import StepCounts, counts_of, difference_interval, length_of
from dflash_core.decoding.decode import DecodedAnswer, DecodingOptions, decode
from dflash_core.decoding.drafts import DrafterDraft
from dflash_core.diagnose.assumption import Assumption, RecordedAnswer, accepted_prefixes
from dflash_core.drafter.config import DrafterConfig, LayerType, layer_ids
from dflash_core.drafter.model import Drafter
from dflash_core.errors import IncompatibleError
from dflash_core.records import Record
from dflash_core.target.cached import CachedTarget

Cause = Literal[
    "layer offset",
    "position shift",
    "mask token",
    "template or thinking",
    "rope",
    "sliding window",
    "embedding",
    "off-policy rows",
    "truncation",
]
DECODED_TOGETHER = 8
LEAST_GAIN = 0.3
"""Tokens of acceptance that an explanation must restore, and ..."""
LEAST_SHARE = 0.1
"""... the share of what is accepted then."""
MOST_MASKS = 64
AGREEMENT_ROWS = 8


class Finding(Record):
    """One cause: what was tried, and what it changed."""

    cause: Cause
    tried: str
    """The best of the alternatives, in words."""
    alternatives: int
    """How many were tried."""
    before: float | None
    """Acceptance as it is; None: nothing could be tried."""
    after: float | None
    """Acceptance under the alternative."""
    explains: bool
    note: str = ""


@dataclass(frozen=True)
class Facts:
    """Where alternatives come from, besides the drafter's own config."""

    references: tuple[DrafterConfig, ...] = ()
    """Configs that the drafter may have been trained under: its run's, the recipe's."""
    mask_ids: tuple[int, ...] = ()
    thetas: tuple[float, ...] = ()
    window: int = 2048
    lm_heads: tuple[tuple[str, Tensor], ...] = ()
    """Other heads by name, [V, H]."""
    ending: tuple[int, ...] | None = None
    """How serving's template ends a prompt; None: not known."""
    cut_share: float = 0.0
    """Share of the training rows that are as long as the recipe allows."""


@dataclass(frozen=True)
class Evidence:
    """Everything measured here is measured on the same prompts, so that before and after can be paired."""

    drafter: Drafter
    target: CachedTarget
    texts: Sequence[RecordedAnswer]
    """Recorded rows: prompt and answer."""
    reach: int
    """Tokens of the longest row trained on."""
    max_new_tokens: int
    facts: Facts = field(default_factory=Facts)

    @property
    def config(self) -> DrafterConfig:
        """The drafter's."""
        return self.drafter.config

    @property
    def as_it_is(self) -> Assumption:
        """No other assumption than serving's."""
        return Assumption("as it is", self.config)

    @cached_property
    def prompts(self) -> list[tuple[int, ...]]:
        """As the rows have them."""
        return [text.ids[: text.answer] for text in self.texts]

    @cached_property
    def served_prompts(self) -> list[tuple[int, ...]]:
        """As serving's template would end them."""
        return [self._as_served(prompt) for prompt in self.prompts]

    @cached_property
    def answers(self) -> list[DecodedAnswer]:
        """The target's own greedy answers to the prompts as the rows have them."""
        return self._decode(self.prompts)

    @cached_property
    def served(self) -> list[DecodedAnswer]:
        """The same to the prompts as serving has them."""
        return self.answers if self.served_prompts == self.prompts else self._decode(self.served_prompts)

    def prefixes(self, texts: Sequence[RecordedAnswer], assumptions: Sequence[Assumption]) -> list[StepCounts]:
        """See `accepted_prefixes`."""
        return accepted_prefixes(self.drafter, self.target, texts, assumptions)

    def _decode(self, prompts: list[tuple[int, ...]]) -> list[DecodedAnswer]:
        draft = DrafterDraft(self.drafter, self.target.embedding, self.target.lm_head)
        options = DecodingOptions(self.max_new_tokens, self.target.stop_tokens)
        return decode(self.target, draft, prompts, options, batch=DECODED_TOGETHER)

    def _as_served(self, prompt: tuple[int, ...]) -> tuple[int, ...]:
        ending = self.facts.ending
        if not ending or prompt[-len(ending) :] == ending or ending[0] not in prompt:
            return prompt
        start = len(prompt) - 1 - prompt[::-1].index(ending[0])
        return (*prompt[:start], *ending)


def acceptance(answers: Sequence[DecodedAnswer]) -> StepCounts:
    """The counts of decoded prompts."""
    return counts_of([answer.histogram for answer in answers])


def within_answers(answers: Sequence[DecodedAnswer]) -> StepCounts:
    """The counts without each answer's last step: it proposes beyond the end, where recorded text has no blocks."""
    return acceptance([replace(answer, steps=answer.steps[:-1]) for answer in answers])


def compared(
    cause: Cause, what: str, before: StepCounts, after: StepCounts, *, alternatives: int = 1, note: str = ""
) -> Finding:
    """The finding of the best alternative: acceptance as it is, and under the alternative."""
    return Finding(
        cause=cause,
        tried=what,
        alternatives=alternatives,
        before=length_of(before),
        after=length_of(after),
        explains=is_clear(before, after),
        note=note,
    )


def nothing_to_try(cause: Cause, before: StepCounts, note: str = "") -> Finding:
    """The finding of a cause for which there is no alternative to try."""
    return Finding(
        cause=cause,
        tried="no alternative",
        alternatives=0,
        before=length_of(before),
        after=None,
        explains=False,
        note=note,
    )


def is_clear(before: StepCounts, after: StepCounts) -> bool:
    """Whether acceptance after is higher beyond noise, and by enough to be the explanation."""
    interval = difference_interval(after, before)
    return interval is not None and interval[0] > 0 and is_enough(length_of(before), length_of(after))


def is_enough(lower: float, higher: float) -> bool:
    """Whether two acceptance lengths are so far apart that it needs an explanation."""
    return higher - lower >= max(LEAST_GAIN, LEAST_SHARE * (higher - 1))


def layer_offset(evidence: Evidence) -> Iterable[Assumption]:
    """Features of the layers next to those named (hidden_states[i] taken for the output of layer i), or the default."""
    ids, last = evidence.config.target_layer_ids, evidence.config.num_target_layers - 1
    candidates = [tuple(i + step for i in ids) for step in (-1, 1)]
    candidates += [reference.target_layer_ids for reference in evidence.facts.references]
    with suppress(IncompatibleError):  # a target too shallow for the default rule
        candidates.append(layer_ids(last + 1, len(ids)))
    for candidate in dict.fromkeys(candidates):
        if candidate != ids and len(candidate) == len(ids) and candidate[0] >= 0 and candidate[-1] <= last:
            what = f"features of layers {_listed(candidate)}, not {_listed(ids)}"
            yield Assumption(what, replace(evidence.config, target_layer_ids=candidate))


def position_shift(evidence: Evidence) -> Iterable[Assumption]:
    """Blocks or features one place off; features that came early showed the anchor's own, which serving has not got."""
    for step in (-1, 1):
        yield replace(evidence.as_it_is, what=f"positions of blocks {step:+d}", block_shift=step)
        yield replace(
            evidence.as_it_is, what=f"features {abs(step)} token {'late' if step > 0 else 'early'}", feature_shift=step
        )


def mask_token(evidence: Evidence) -> Iterable[Assumption]:
    """Other tokens in the slots to be filled."""
    known = [reference.mask_token_id for reference in evidence.facts.references]
    candidates = [i for i in dict.fromkeys([*known, *evidence.facts.mask_ids]) if 0 <= i < evidence.config.vocab_size]
    for candidate in candidates[:MOST_MASKS]:
        if candidate != evidence.config.mask_token_id:
            what = f"mask token {candidate}, not {evidence.config.mask_token_id}"
            yield Assumption(what, replace(evidence.config, mask_token_id=candidate))


def rope(evidence: Evidence) -> Iterable[Assumption]:
    """Other bases of the rotation."""
    known = [reference.rope_theta for reference in evidence.facts.references]
    for theta in dict.fromkeys([*known, *evidence.facts.thetas]):
        if theta != evidence.config.rope_theta:
            what = f"rope_theta {theta:g}, not {evidence.config.rope_theta:g}"
            yield Assumption(what, replace(evidence.config, rope_theta=theta))


def sliding_window(evidence: Evidence) -> Iterable[Assumption]:
    """Other patterns of full and sliding layers, other windows."""
    config, layers = evidence.config, evidence.config.num_hidden_layers
    full: tuple[LayerType, ...] = ("full_attention",)
    sliding: tuple[LayerType, ...] = ("sliding_attention",)
    patterns: list[tuple[tuple[LayerType, ...], int | None]] = [(full * layers, None)]
    for window in (config.sliding_window or evidence.facts.window, evidence.facts.window):
        patterns += [(sliding * (layers - 1) + full, window), (sliding * layers, window)]
    patterns += [(reference.layer_types, reference.sliding_window) for reference in evidence.facts.references]
    for types, width in dict.fromkeys(patterns):
        same = types == config.layer_types and (width == config.sliding_window or sliding[0] not in types)
        if not same and len(types) == layers:
            shown = ", ".join("S" if kind == "sliding_attention" else "F" for kind in types)
            what = f"layers {shown}" + (f" with window {width}" if "S" in shown else "")
            yield Assumption(what, replace(config, layer_types=types, sliding_window=width))


def embedding(evidence: Evidence) -> Iterable[Assumption]:
    """Embedding and lm_head of the target exchanged, tied though they are not, or not tied though they are."""
    target = evidence.target
    if target.embedding.data_ptr() != target.lm_head.data_ptr():
        yield replace(evidence.as_it_is, what="the embedding as lm_head (tied)", lm_head=target.embedding)
        yield replace(evidence.as_it_is, what="the lm_head as embedding (tied)", embedding=target.lm_head)
    for name, head in evidence.facts.lm_heads:
        yield replace(evidence.as_it_is, what=name, lm_head=head)


CAUSES: dict[Cause, Callable[[Evidence], Iterable[Assumption]]] = {
    "layer offset": layer_offset,
    "position shift": position_shift,
    "mask token": mask_token,
    "rope": rope,
    "sliding window": sliding_window,
    "embedding": embedding,
}


def try_shapes(evidence: Evidence) -> tuple[StepCounts, list[Finding]]:
    """The accepted prefixes as it is, and a finding for each cause."""
    tried = {cause: list(alternatives(evidence)) for cause, alternatives in CAUSES.items()}
    flat = [assumption for assumptions in tried.values() for assumption in assumptions]
    before, *after = evidence.prefixes(evidence.texts, [evidence.as_it_is, *flat])
    measured = iter(after)
    findings = []
    for cause, assumptions in tried.items():
        pairs = [(assumption, next(measured)) for assumption in assumptions]
        if not pairs:
            findings.append(nothing_to_try(cause, before))
            continue
        best, counts = max(pairs, key=lambda pair: length_of(pair[1]))
        findings.append(compared(cause, best.what, before, counts, alternatives=len(pairs)))
    return before, findings


def _listed(ids: tuple[int, ...]) -> str:
    return ", ".join(map(str, ids))


def try_template(evidence: Evidence) -> Finding:
    """Served prompts against the prompts of the rows, both decoded."""
    ending = evidence.facts.ending
    differing = sum(a != b for a, b in zip(evidence.prompts, evidence.served_prompts, strict=True))
    if not differing:
        known = "serving's template is not known" if ending is None else "the rows' prompts end as serving ends them"
        return nothing_to_try("template or thinking", acceptance(evidence.served), known)
    return compared(
        "template or thinking",
        "prompts that end as the rows' do, not as serving's template and options end them",
        acceptance(evidence.served),
        acceptance(evidence.answers),
        note=f"{differing} of {len(evidence.prompts)} prompts end otherwise when served",
    )


def try_off_policy(evidence: Evidence) -> Finding:
    """The recorded answers against the target's own to the same prompts, no longer than the recorded ones."""
    own = [
        RecordedAnswer(text.name, (*prompt, *answer.tokens[: len(text.ids) - text.answer]), text.answer)
        for text, prompt, answer in zip(evidence.texts, evidence.prompts, evidence.answers, strict=True)
    ]
    (before,), (after,) = (evidence.prefixes(texts, [evidence.as_it_is]) for texts in (own, evidence.texts))
    return compared(
        "off-policy rows",
        "the rows' answers, not the target's own",
        before,
        after,
        note=f"{100 * _agreement(evidence):.0f} % of the rows' tokens are what the target would say next",
    )


def try_truncation(evidence: Evidence) -> Finding:
    """Verification steps within the trained lengths against all of them."""
    within, every = _counts_within(evidence), acceptance(evidence.answers)
    beyond = int(every[:, 1].sum() - within[:, 1].sum())
    cut = f"{100 * evidence.facts.cut_share:.0f} % are cut at the limit"
    note = f"the longest row trained on has {evidence.reach} tokens, {cut}"
    if not beyond or not within[:, 1].any():
        return nothing_to_try("truncation", every, f"{note}; {'no' if not beyond else 'every'} served step is beyond")
    return compared(
        "truncation",
        f"only the steps within {evidence.reach} tokens",
        every,
        within,
        note=f"{note}; {beyond} of {int(every[:, 1].sum())} served steps are beyond",
    )


def _counts_within(evidence: Evidence) -> StepCounts:
    """The counts of steps whose block ends within the trained lengths."""
    counts = np.zeros((len(evidence.prompts), 2))
    for line, (prompt, answer) in enumerate(zip(evidence.prompts, evidence.answers, strict=True)):
        at = len(prompt)
        for step in answer.steps:
            if at + evidence.config.block_size <= evidence.reach:
                counts[line] += (step.accepted, 1)
            at += step.accepted + 1
    return counts


@torch.no_grad()
def _agreement(evidence: Evidence) -> float:
    """Share of recorded answer tokens that are the target's likeliest."""
    hits = total = 0
    for text in evidence.texts[:AGREEMENT_ROWS]:
        ids = torch.tensor([text.ids], device=evidence.target.device)
        said = evidence.target.model(input_ids=ids, use_cache=False).logits[0, text.answer - 1 : -1].argmax(-1)
        hits += int((said == ids[0, text.answer :]).sum())
        total += len(said)
    return hits / max(1, total)
