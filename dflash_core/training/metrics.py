"""What a step reports: one record, written as a JSON line and handed to whoever shows progress; without torch."""

import time
from collections.abc import Callable
from pathlib import Path

from dflash_core.records import Record

SMOOTHING = 0.9


class StepMetrics(Record):
    """One optimizer step over all ranks. `step` counts from 1."""

    step: int
    steps: int
    epoch: int
    loss: float | None
    """Weighted mean cross-entropy, nats; None for a skipped step."""
    accepted_prefix: float
    """Mean over blocks of the length of the all-correct prefix, plus one (the anchor)."""
    slot_accuracy: tuple[float, ...]
    """Share of right predictions in slots 1..K-1, each on its own."""
    learning_rate: float
    grad_norm: float | None
    """Before clipping; None for a skipped step."""
    rows: int
    tokens: int
    skipped: bool
    bad_rows: int
    tokens_per_s: float
    waiting_share: float
    """Share of the step's time in which the lead rank waited for data."""
    eta_s: float
    held_out_loss: float | None = None
    held_out_accepted_prefix: float | None = None
    """Both after steps that validate."""
    acceptance_length: float | None = None
    """By draft-and-verify decoding of a few held-out prompts, after steps that measure it."""

    def scalars(self) -> dict[str, float]:
        """Every number by its name in trackers; what the step did not measure is absent."""
        single = {
            "train/loss": self.loss,
            "train/accepted_prefix": self.accepted_prefix,
            "train/grad_norm": self.grad_norm,
            "train/learning_rate": self.learning_rate,
            "train/bad_rows": self.bad_rows,
            "train/skipped": int(self.skipped),
            "held_out/loss": self.held_out_loss,
            "held_out/accepted_prefix": self.held_out_accepted_prefix,
            "held_out/acceptance_length": self.acceptance_length,
            "speed/tokens_per_s": self.tokens_per_s,
            "speed/waiting_share": self.waiting_share,
        }
        slots = {f"slot_accuracy/{slot:02d}": share for slot, share in enumerate(self.slot_accuracy, 1)}
        return {name: float(value) for name, value in {**single, **slots}.items() if value is not None}


OnStep = Callable[[StepMetrics], None]
"""Takes each step once its outcome is known."""


class Clock:
    """Turns moments into speeds. Monotonic: a clock that jumps changes nothing."""

    def __init__(self) -> None:
        self._last = time.monotonic()
        self._waited = 0.0
        self._step_s: float | None = None

    def lap(self, waited_s: float) -> tuple[float, float]:
        """End a step: (its seconds, the share of them spent waiting). `waited_s` is a running total."""
        now = time.monotonic()
        seconds, waited = max(now - self._last, 1e-9), waited_s - self._waited
        self._last, self._waited = now, waited_s
        self._step_s = seconds if self._step_s is None else SMOOTHING * self._step_s + (1 - SMOOTHING) * seconds
        return seconds, min(1.0, waited / seconds)

    def eta_s(self, steps_left: int) -> float:
        """Seconds until the end at the smoothed speed."""
        return (self._step_s or 0.0) * steps_left


class MetricsFile:
    """The run's JSON lines, one a step, from the first on."""

    def __init__(self, path: Path, steps_done: int) -> None:
        """Continue the file after its first `steps_done` lines; what a crashed attempt wrote beyond them goes."""
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = path.read_bytes().splitlines(keepends=True)[:steps_done] if path.exists() else []
        path.write_bytes(b"".join(lines))
        self._file = path.open("a", buffering=1, encoding="utf8")  # whoever follows the file sees whole lines

    def write(self, metrics: StepMetrics) -> None:
        """Append a line."""
        self._file.write(metrics.model_dump_json() + "\n")

    def flush(self) -> int:
        """Hand everything to the operating system; returns the file's length in bytes."""
        self._file.flush()
        return self.path.stat().st_size

    def close(self) -> None:
        """Close the file."""
        self._file.close()
