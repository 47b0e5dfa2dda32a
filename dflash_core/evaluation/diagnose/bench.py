"""What a diagnosis works with: the drafter, the target, some prompts with their recorded answers, and what is known."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from torch import Tensor

from dflash_core.drafter.config import DrafterConfig
from dflash_core.drafter.model import Drafter
from dflash_core.evaluation.acceptance import Counts, counts_of, difference_interval, length_of
from dflash_core.evaluation.decode import Generation, Sampling, decode
from dflash_core.evaluation.diagnose.assumption import Assumption, Text, accepted_prefixes
from dflash_core.evaluation.drafts import DrafterDraft
from dflash_core.evaluation.target import VerifyingTarget
from dflash_core.records import Record

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
class Bench:
    """Everything measured here is measured on the same prompts, so that before and after can be paired."""

    drafter: Drafter
    target: VerifyingTarget
    texts: Sequence[Text]
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
    def generations(self) -> list[Generation]:
        """The target's own greedy answers to the prompts as the rows have them."""
        return self._decode(self.prompts)

    @cached_property
    def served(self) -> list[Generation]:
        """The same to the prompts as serving has them."""
        return self.generations if self.served_prompts == self.prompts else self._decode(self.served_prompts)

    def prefixes(self, texts: Sequence[Text], assumptions: Sequence[Assumption]) -> list[Counts]:
        """See `accepted_prefixes`."""
        return accepted_prefixes(self.drafter, self.target, texts, assumptions)

    def _decode(self, prompts: list[tuple[int, ...]]) -> list[Generation]:
        draft = DrafterDraft(self.drafter, self.target.embedding, self.target.lm_head)
        sampling = Sampling(self.max_new_tokens, self.target.stop_tokens)
        return decode(self.target, draft, prompts, sampling, batch=DECODED_TOGETHER)

    def _as_served(self, prompt: tuple[int, ...]) -> tuple[int, ...]:
        ending = self.facts.ending
        if not ending or prompt[-len(ending) :] == ending or ending[0] not in prompt:
            return prompt
        start = len(prompt) - 1 - prompt[::-1].index(ending[0])
        return (*prompt[:start], *ending)


def acceptance(generations: Sequence[Generation]) -> Counts:
    """The counts of decoded prompts."""
    return counts_of([generation.histogram for generation in generations])


def within_answers(generations: Sequence[Generation]) -> Counts:
    """The counts without each answer's last step: it proposes beyond the end, where recorded text has no blocks."""
    return acceptance([replace(generation, steps=generation.steps[:-1]) for generation in generations])


def compared(
    cause: Cause, what: str, before: Counts, after: Counts, *, alternatives: int = 1, note: str = ""
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


def nothing_to_try(cause: Cause, before: Counts, note: str = "") -> Finding:
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


def is_clear(before: Counts, after: Counts) -> bool:
    """Whether acceptance after is higher beyond noise, and by enough to be the explanation."""
    interval = difference_interval(after, before)
    return interval is not None and interval[0] > 0 and is_enough(length_of(before), length_of(after))


def is_enough(lower: float, higher: float) -> bool:
    """Whether two acceptance lengths lie so far apart that it needs an explanation."""
    return higher - lower >= max(LEAST_GAIN, LEAST_SHARE * (higher - 1))
