"""Progress at the terminal: bars with the time left on standard error, lines where it is not a terminal."""

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

from dflash_core.cli.app import errors
from dflash_core.records import OnProgress

if TYPE_CHECKING:
    from dflash_core.generation.progress import GenerationProgress
    from dflash_core.training.metrics import OnStep, StepMetrics

log = logging.getLogger("dflash_core")


@contextmanager
def progress(what: str, total: int) -> Iterator[OnProgress]:
    """A bar moved by (done, total)."""
    columns = (SpinnerColumn(), TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as bar:
        task = bar.add_task("", total=total)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def generation_bar() -> Iterator[Callable[["GenerationProgress"], None]]:
    """Tokens/s, requests in flight, time left, cost."""
    columns = (SpinnerColumn(), TextColumn("generate"), BarColumn(), TaskProgressColumn())
    text = TextColumn("{task.description}")
    with Progress(*columns, text, console=errors, transient=True, disable=not errors.is_terminal) as bar:
        task = bar.add_task("", total=1.0)
        yield lambda now: bar.update(task, completed=now.share, description=now.text())


@contextmanager
def training_steps() -> Iterator["OnStep"]:
    """What shows each step: a bar, or a line every few seconds; our own log lines are shown in full, too."""
    from dflash_core.training.progress import LINE_EVERY_S, describe, every

    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    log.setLevel(logging.INFO)
    if not errors.is_terminal:
        yield every(LINE_EVERY_S, lambda metrics: log.info(describe(metrics)))
        return
    with _training_bar() as show:
        yield show


@contextmanager
def _training_bar() -> Iterator["OnStep"]:
    from dflash_core.training.progress import duration

    columns = (TextColumn("train"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[numbers]}"))
    with Progress(*columns, console=errors, refresh_per_second=4) as bar:
        task = bar.add_task("", total=None, numbers="")
        held_out = accepted = ""

        def show(metrics: "StepMetrics") -> None:
            nonlocal held_out, accepted
            if metrics.held_out_accepted_prefix is not None:
                held_out = f" | held out {metrics.held_out_accepted_prefix:.2f}"
            if metrics.acceptance_length is not None:
                accepted = f" | accepted {metrics.acceptance_length:.2f}"
            loss = "skipped" if metrics.loss is None else f"loss {metrics.loss:.3f}"
            numbers = (
                f"{loss} | prefix {metrics.accepted_prefix:.2f}{held_out}{accepted} | "
                f"{metrics.tokens_per_s:,.0f} tok/s, {metrics.waiting_share:.0%} waiting | "
                f"{duration(metrics.eta_s)} left"
            )
            bar.update(task, total=metrics.steps, completed=metrics.step, numbers=numbers)

        yield show
