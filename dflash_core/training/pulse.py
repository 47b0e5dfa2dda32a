"""Whether every rank's process still runs, seen from the starter: a stopped one cannot tell, whoever waits for it.

Each rank touches a file of its own from a thread. The trade-off: that shows that a process runs, not that its work goes
on, so the waiting for each other within a step has limits of its own (`placement.step_group`, `arrival`).
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from dflash_core.training.ticking import ticking

BEAT_S = 1.0


@contextmanager
def beating(file: Path) -> Iterator[None]:
    """Touch `file` every second; at the end it goes, and nobody is missed."""
    file.touch()
    try:
        with ticking(lambda: os.utime(file), BEAT_S, "pulse"):
            yield
    finally:
        file.unlink()


class Pulses:
    """Counts how often one looked since each file was touched: no clock, which a suspended machine would upset."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = files
        self._touched: list[int | None] = [None] * len(files)
        self._in_vain = [0] * len(files)

    def look(self) -> None:
        """Look at all files; one that is not there is not waited for."""
        for rank, file in enumerate(self._files):
            try:
                touched = file.stat().st_mtime_ns
            except FileNotFoundError:
                touched = None
            same = touched is not None and touched == self._touched[rank]
            self._touched[rank], self._in_vain[rank] = touched, self._in_vain[rank] + 1 if same else 0

    def silent(self, looks: float) -> list[int]:
        """The ranks that were not seen to beat in the last `looks` looks."""
        return [rank for rank, count in enumerate(self._in_vain) if count >= looks]
