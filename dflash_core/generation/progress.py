"""How far a generation is: measured in bytes of prompts, since lines are not known before a file is opened."""

import time
from collections import Counter, deque
from dataclasses import dataclass, field
from datetime import timedelta

from dflash_core.generation.answers import Answer
from dflash_core.recipe import GenerationSettings

WINDOW_S = 30.0
"""Rates are those of the last this many seconds."""


@dataclass(frozen=True)
class GenerationProgress:
    """What a progress bar shows."""

    share: float
    """Of the prompts, by bytes, 0 to 1."""
    settled: int
    """Prompts with an answer, or given up, so far; those of earlier runs included."""
    answers: int
    """Answers that came in this run."""
    in_flight: int
    allowed: int
    """Requests that the servers seem to bear."""
    tokens_per_s: float
    """Completion tokens."""
    eta_s: float | None
    cost: float
    """Of this run so far, in the recipe's currency; 0 without prices."""
    cost_estimate: float | None
    """Of this run in all."""
    outcomes: dict[str, int]
    """Of the prompts settled in this run."""

    def text(self) -> str:
        """One short line."""
        parts = [] if self.eta_s is None else [f"{timedelta(seconds=round(self.eta_s))} left"]
        parts += [f"{self.tokens_per_s:,.0f} tokens/s", f"{self.in_flight} of {self.allowed} in flight"]
        parts += [f"{count:,} {outcome}" for outcome, count in self.outcomes.items()]
        if self.cost_estimate:
            parts.append(f"cost {self.cost:,.2f} of about {self.cost_estimate:,.2f}")
        return ", ".join(parts)


@dataclass
class GenerationMeter:
    """Counts while a generation runs. Belongs to one event loop."""

    generation: GenerationSettings
    total_bytes: int
    known_bytes: float = 0.0
    """Of prompts that needed no request."""
    asked_bytes: float = 0.0
    """Of prompts that were settled by asking."""
    settled: int = 0
    answers: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    _began: float = field(default_factory=time.monotonic)
    _recent: deque[tuple[float, int]] = field(default_factory=deque)

    def answered(self, answer: Answer) -> None:
        """An answer came."""
        self.answers += 1
        self.prompt_tokens += answer.prompt_tokens
        self.completion_tokens += answer.completion_tokens
        self._recent.append((time.monotonic(), answer.completion_tokens))

    def read(self, in_flight: int, allowed: int) -> GenerationProgress:
        """The state now."""
        now = time.monotonic()
        elapsed_s = now - self._began
        while self._recent and self._recent[0][0] < now - WINDOW_S:
            self._recent.popleft()
        rate = sum(tokens for _, tokens in self._recent) / max(1e-3, min(WINDOW_S, elapsed_s))
        left = max(0.0, self.total_bytes - self.known_bytes - self.asked_bytes)
        to_come = left / self.asked_bytes if self.asked_bytes else None
        prices = self.generation
        cost = prices.price_hour * elapsed_s / 3600
        cost += prices.price_prompt_tokens * self.prompt_tokens / 1e6
        cost += prices.price_completion_tokens * self.completion_tokens / 1e6
        return GenerationProgress(
            share=1.0 - left / max(1, self.total_bytes),
            settled=self.settled,
            answers=self.answers,
            in_flight=in_flight,
            allowed=allowed,
            tokens_per_s=rate,
            eta_s=None if to_come is None else elapsed_s * to_come,
            cost=cost,
            cost_estimate=None if to_come is None else cost * (1 + to_come),
            outcomes=dict(self.outcomes.most_common()),
        )
