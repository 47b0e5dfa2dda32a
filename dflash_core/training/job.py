"""What whoever starts a training says to it: what to train, when to stop, and which of several processes it is.

Without torch, so that a starter (`ranks`, an asset) need not import it.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

INTERRUPTED = 130
"""Exit code of a process that is stopped without saving."""


@dataclass(frozen=True)
class Job:
    """What to train, besides the recipe."""

    training_set: str | None = None
    """Hash; None: the training set that was frozen last."""
    accept_failed_gate: bool = False
    """Train although the gate failed; recorded in the checkpoint."""
    profile: bool = False
    """Write a trace of a few steps below storage.work_dir."""


@dataclass(frozen=True)
class Rank:
    """Which process of a training this one is."""

    number: int = 0
    """Rank 0 leads: it writes metrics, checkpoints and results."""
    count: int = 1
    rendezvous: Path | None = None
    """A file that does not exist yet, through which several find each other."""


class StopRequest:
    """Asks the training loop to end after the step it is in."""

    def __init__(self) -> None:
        self._asked = False

    @property
    def asked(self) -> bool:
        """Whether somebody asked."""
        return self._asked

    def ask(self) -> None:
        """End after this step."""
        self._asked = True


@contextmanager
def stop_on_signals(stop: StopRequest) -> Iterator[None]:
    """SIGINT and SIGTERM ask for an end after the running step; a second one ends the process at once."""

    def handle(number: int, frame: FrameType | None) -> None:
        if stop.asked:
            os._exit(INTERRUPTED)
        os.write(2, b"stopping after this step; once more to stop without saving\n")
        stop.ask()

    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, handle) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
