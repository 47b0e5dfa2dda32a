"""The decodings behind a report: the drafter and its rivals on the same prompts, some of them against the clock.

The trade-off: only the timed prompts are decoded one at a time (with and without the drafter in turn, so that a busy
machine slows both alike); everything else shares its passes, since counts do not depend on company.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from dflash_core.batches.split import uniform_bits
from dflash_core.evaluation.decode import Generation, Sampling, decode, generate
from dflash_core.evaluation.drafts import Draft, DrafterDraft, NgramDraft, NoDraft
from dflash_core.evaluation.ngram import NgramModel
from dflash_core.evaluation.prompts import STATES, Prompt, State, ThinkingSwitch
from dflash_core.evaluation.subject import Subject

Progress = Callable[[int, int], None]
WARM_UP_TOKENS = 32
"""Decoded of the first prompt before the clock runs."""


@dataclass(frozen=True)
class Rivals:
    """What each of the drafters made of the same prompts, in their order."""

    drafter: list[Generation]
    ngram: list[Generation]
    no_features: list[Generation]


@dataclass(frozen=True)
class Measured:
    """Everything that was decoded."""

    prompts: list[Prompt]
    main: Rivals
    plain: list[Generation]
    """Without a draft."""
    timed: int
    """The first this many were decoded one at a time."""
    temperatures: dict[float, Rivals]
    """The first prompts at further temperatures."""
    thinking: dict[State, list[Generation]]
    """The drafter on the first prompts that have the switch, in each state."""


class Meter:
    """Decodes and counts what is done."""

    def __init__(self, subject: Subject, ngram: NgramModel, on_progress: Progress) -> None:
        self.subject, self.ngram = subject, ngram
        self.settings = subject.recipe.evaluation
        self.block_size = self.settings.block_size or subject.config.block_size
        self._on_progress, self._done, self._total = on_progress, 0, 1

    def measure(self, prompts: list[Prompt], switch: ThinkingSwitch | None) -> Measured:
        """Decode everything the report needs."""
        settings = self.settings
        few = prompts[: settings.cut_prompts]
        temperatures = [t for t in dict.fromkeys(settings.cut_temperatures) if t != settings.temperature]
        asked = [p for p in few if switch is not None and switch.state(p.ids) is not None]
        self._total = 4 * len(prompts) + 3 * len(few) * len(temperatures) + len(asked)
        self._on_progress(0, self._total)
        drafter, plain = self._against_the_clock([p.ids for p in prompts])
        main = self._rivals(prompts, settings.temperature, drafter)
        return Measured(
            prompts=prompts,
            main=main,
            plain=plain,
            timed=min(settings.timed_prompts, len(prompts)),
            temperatures={t: self._rivals(few, t, None) for t in temperatures},
            thinking={} if switch is None or not asked else self._thinking(switch, few, main.drafter),
        )

    def _against_the_clock(self, prompts: list[tuple[int, ...]]) -> tuple[list[Generation], list[Generation]]:
        sampling, timed = self._sampling(self.settings.temperature), self.settings.timed_prompts
        drafts: tuple[Draft, Draft] = (self._drafter(sampling.temperature), NoDraft())
        for draft in drafts:  # untimed: what is compiled or allocated once is no prompt's time
            for prompt in prompts[: min(timed, 1)]:
                short = min(WARM_UP_TOKENS, sampling.max_new_tokens)
                generate(self.subject.target, draft, prompt, replace(sampling, max_new_tokens=short))
        ours, plain = list[Generation](), list[Generation]()
        for number, prompt in enumerate(prompts[:timed]):
            own = replace(sampling, seed=uniform_bits("timed", sampling.seed, number) >> 1)
            ours.append(generate(self.subject.target, drafts[0], prompt, own))
            plain.append(generate(self.subject.target, drafts[1], prompt, own))
            self._advance(2)
        for draft, into in zip(drafts, (ours, plain), strict=True):
            into += self._together(draft, prompts[timed:], sampling)
        return ours, plain

    def _rivals(self, prompts: Sequence[Prompt], temperature: float, drafter: list[Generation] | None) -> Rivals:
        sampling, ids = self._sampling(temperature), [p.ids for p in prompts]
        if drafter is None:
            drafter = self._together(self._drafter(temperature), ids, sampling)
        ngram = NgramDraft(self.ngram, self.block_size)
        blind = self._drafter(temperature, zero_features=True)
        return Rivals(drafter, self._together(ngram, ids, sampling), self._together(blind, ids, sampling))

    def _thinking(
        self, switch: ThinkingSwitch, prompts: Sequence[Prompt], own: list[Generation]
    ) -> dict[State, list[Generation]]:
        """Each prompt in its own state as decoded already, and in the other."""
        sampling = self._sampling(self.settings.temperature)
        states = [switch.state(prompt.ids) for prompt in prompts]
        made: dict[State, list[Generation]] = {}
        for state in STATES:
            others = [
                switched
                for prompt, now in zip(prompts, states, strict=True)
                if now not in (None, state) and (switched := switch.switched(prompt.ids, state)) is not None
            ]
            mine = [g for g, now in zip(own, states, strict=False) if now == state]
            made[state] = mine + self._together(self._drafter(sampling.temperature), others, sampling)
        return made

    def _together(self, draft: Draft, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Generation]:
        before = self._done

        def on_done(count: int) -> None:
            self._advance(before + count - self._done)

        return decode(self.subject.target, draft, prompts, sampling, batch=self.settings.batch, on_done=on_done)

    def _advance(self, count: int) -> None:
        self._done += count
        self._on_progress(self._done, self._total)

    def _sampling(self, temperature: float) -> Sampling:
        seed = uniform_bits("evaluation", self.subject.recipe.seed) >> 1
        return Sampling(self.settings.max_new_tokens, self.subject.target.stop_tokens, temperature, seed)

    def _drafter(self, temperature: float, *, zero_features: bool = False) -> DrafterDraft:
        target = self.subject.target
        return DrafterDraft(
            self.subject.drafter,
            target.embedding,
            target.lm_head,
            block_size=self.block_size,
            temperature=temperature,
            zero_features=zero_features,
        )
