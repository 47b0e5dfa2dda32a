"""The decodings behind a report: the drafter and its rivals on the same prompts, some of them against the clock.

The trade-off: only the timed prompts are decoded one at a time (with and without the drafter in turn, so that a busy
machine slows both alike); everything else shares its passes, since counts do not depend on company.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dflash_core.batches.order import uniform_bits
from dflash_core.decoding.decode import DecodedAnswer, DecodingOptions, decode, generate
from dflash_core.decoding.drafts import Draft, DrafterDraft, NgramDraft, NgramModel, NoDraft
from dflash_core.decoding.prompts import STATES, HeldOutPrompt, ThinkingState, ThinkingSwitch
from dflash_core.evaluation.held_out import Subject
from dflash_core.records import OnProgress

WARM_UP_TOKENS = 32
"""Decoded of the first prompt before the clock runs."""


@dataclass(frozen=True)
class Rivals:
    """What each of the drafters made of the same prompts, in their order."""

    drafter: list[DecodedAnswer]
    ngram: list[DecodedAnswer]
    no_features: list[DecodedAnswer]


@dataclass(frozen=True)
class Decodings:
    """Everything that was decoded."""

    prompts: list[HeldOutPrompt]
    main: Rivals
    plain: list[DecodedAnswer]
    """Without a draft."""
    timed: int
    """The first this many were decoded one at a time."""
    temperatures: dict[float, Rivals]
    """The first prompts at further temperatures."""
    thinking: dict[ThinkingState, list[DecodedAnswer]]
    """The drafter on the first prompts that have the switch, in each state."""


class Meter:
    """Decodes, and tells how much of it is done."""

    def __init__(self, subject: Subject, ngram: NgramModel, on_progress: OnProgress) -> None:
        self.subject, self.ngram = subject, ngram
        self.settings = subject.recipe.evaluation
        self.block_size = self.settings.block_size or subject.config.block_size
        self._on_progress, self._done, self._total = on_progress, 0, 1

    def measure(self, prompts: list[HeldOutPrompt], switch: ThinkingSwitch | None) -> Decodings:
        """Decode everything the report needs."""
        settings = self.settings
        few = prompts[: settings.cut_prompts]
        temperatures = [t for t in dict.fromkeys(settings.cut_temperatures) if t != settings.temperature]
        asked = [p for p in few if switch is not None and switch.state(p.ids) is not None]
        self._total = 4 * len(prompts) + 3 * len(few) * len(temperatures) + len(asked)
        self._on_progress(0, self._total)
        drafter, plain = self._against_the_clock([p.ids for p in prompts])
        main = self._rivals(prompts, settings.temperature, drafter)
        return Decodings(
            prompts=prompts,
            main=main,
            plain=plain,
            timed=min(settings.timed_prompts, len(prompts)),
            temperatures={t: self._rivals(few, t, None) for t in temperatures},
            thinking={} if switch is None or not asked else self._thinking(switch, few, main.drafter),
        )

    def _against_the_clock(self, prompts: list[tuple[int, ...]]) -> tuple[list[DecodedAnswer], list[DecodedAnswer]]:
        options, timed = self._options(self.settings.temperature), self.settings.timed_prompts
        drafts: tuple[Draft, Draft] = (self._drafter(options.temperature), NoDraft())
        for draft in drafts:  # untimed: what is compiled or allocated once is not a prompt's time
            for prompt in prompts[: min(timed, 1)]:
                short = min(WARM_UP_TOKENS, options.max_new_tokens)
                generate(self.subject.target, draft, prompt, replace(options, max_new_tokens=short))
        ours, plain = list[DecodedAnswer](), list[DecodedAnswer]()
        for number, prompt in enumerate(prompts[:timed]):
            own = replace(options, seed=uniform_bits("timed", options.seed, number) >> 1)
            ours.append(generate(self.subject.target, drafts[0], prompt, own))
            plain.append(generate(self.subject.target, drafts[1], prompt, own))
            self._advance(2)
        for draft, into in zip(drafts, (ours, plain), strict=True):
            into += self._together(draft, prompts[timed:], options)
        return ours, plain

    def _rivals(
        self, prompts: Sequence[HeldOutPrompt], temperature: float, drafter: list[DecodedAnswer] | None
    ) -> Rivals:
        options, ids = self._options(temperature), [p.ids for p in prompts]
        if drafter is None:
            drafter = self._together(self._drafter(temperature), ids, options)
        ngram = NgramDraft(self.ngram, self.block_size)
        blind = self._drafter(temperature, zero_features=True)
        return Rivals(drafter, self._together(ngram, ids, options), self._together(blind, ids, options))

    def _thinking(
        self, switch: ThinkingSwitch, prompts: Sequence[HeldOutPrompt], own: list[DecodedAnswer]
    ) -> dict[ThinkingState, list[DecodedAnswer]]:
        """Each prompt in its own state as decoded already, and in the other."""
        options = self._options(self.settings.temperature)
        states = [switch.state(prompt.ids) for prompt in prompts]
        made: dict[ThinkingState, list[DecodedAnswer]] = {}
        for state in STATES:
            others = [
                switched
                for prompt, now in zip(prompts, states, strict=True)
                if now not in (None, state) and (switched := switch.switched(prompt.ids, state)) is not None
            ]
            mine = [g for g, now in zip(own, states, strict=False) if now == state]
            made[state] = mine + self._together(self._drafter(options.temperature), others, options)
        return made

    def _together(
        self, draft: Draft, prompts: Sequence[Sequence[int]], options: DecodingOptions
    ) -> list[DecodedAnswer]:
        before = self._done

        def on_done(count: int) -> None:
            self._advance(before + count - self._done)

        return decode(self.subject.target, draft, prompts, options, batch=self.settings.batch, on_done=on_done)

    def _advance(self, count: int) -> None:
        self._done += count
        self._on_progress(self._done, self._total)

    def _options(self, temperature: float) -> DecodingOptions:
        seed = uniform_bits("evaluation", self.subject.recipe.seed) >> 1
        return DecodingOptions(self.settings.max_new_tokens, self.subject.target.stop_tokens, temperature, seed)

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
