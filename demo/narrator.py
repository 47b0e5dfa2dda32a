"""One numbered line a step, with a progress bar while it runs."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from dflash_core.storage.layout import METRICS_FILE, RUNS

Move = Callable[[int, int], None]
"""Moves the bar to (done, total)."""


@dataclass
class Narrator:
    """Tells `steps` steps on a console."""

    console: Console
    steps: int
    step: int = 0

    def tell(self, what: str, work: Callable[[Move], str]) -> None:
        """Run a step; `work` moves the bar with (done, total) and returns what came of it."""
        self.step += 1
        began = time.monotonic()
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        quiet = not self.console.is_terminal
        with Progress(*columns, TimeRemainingColumn(), console=self.console, transient=True, disable=quiet) as progress:
            task = progress.add_task(what, total=None)
            outcome = work(lambda done, total: _move(progress, task, done, total))
        number = f"[{self.step:>2}/{self.steps}]"
        seconds = f"{time.monotonic() - began:5.1f} s"
        self.console.print(f"{number} {what:<10} {seconds}  {outcome}", markup=False, highlight=False, soft_wrap=True)


def _move(progress: Progress, task: TaskID, done: int, total: int) -> None:
    progress.update(task, completed=done, total=total)


@dataclass
class StepWatch:
    """Moves the bar by the metrics that the trainer writes below the work folder, under the names it has in S3."""

    work_dir: Path
    move: Move
    started: float = field(default_factory=time.time)

    def look(self) -> None:
        """Read the last line of the newest metrics file of this training."""
        runs = self.work_dir / RUNS
        files = [f for f in runs.glob(f"*/{METRICS_FILE}") if f.stat().st_mtime >= self.started]
        lines = [line for file in files for line in file.read_text().splitlines()[-1:]]
        for line in lines:
            step: dict[str, Any] = json.loads(line)
            self.move(step["step"], step["steps"])
