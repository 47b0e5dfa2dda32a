"""Shows a run while it goes: a bar at a terminal, a line every few seconds elsewhere, and the Dagster run's log.

This is the one module below the asset layer that knows Dagster, through its Pipes protocol alone.
"""

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import dagster_pipes
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from dflash_core.training.metrics import Report, StepMetrics
from dflash_core.training.trackers import scalars

log = logging.getLogger(__name__)

LINE_EVERY_S = 5.0
OBSERVED_EVERY_S = 15.0
"""Each is an event in Dagster's database."""


def log_to_stderr() -> None:
    """Our own messages in full, those of libraries from warnings on; for processes that train and nothing else."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("dflash_core").setLevel(logging.INFO)


@contextmanager
def report_steps(pipes: bool, lead: bool = True) -> Iterator[Report]:
    """A function that shows each step it is given; nothing on ranks that do not lead.

    Args:
        pipes: tell the Dagster run, too, in its log and as numbers; only the lead opens the channel.
        lead: whether this process leads.
    """
    with ExitStack() as stack:
        shown: list[Report] = []
        if lead and sys.stderr.isatty():
            shown.append(stack.enter_context(_bar()))
        elif lead:
            shown.append(_every(LINE_EVERY_S, lambda metrics: log.info(describe(metrics))))
        if lead and pipes:
            context = stack.enter_context(dagster_pipes.open_dagster_pipes())
            shown.append(_every(LINE_EVERY_S, lambda metrics: context.log.info(describe(metrics))))
            shown.append(_every(OBSERVED_EVERY_S, lambda metrics: context.report_custom_message(_numbers(metrics))))

        def report(metrics: StepMetrics) -> None:
            for show in shown:
                show(metrics)

        yield report


def _numbers(metrics: StepMetrics) -> dict[str, float]:
    """Where the run is and how well it goes, for the UI's plots."""
    return {"step": metrics.step, "of_steps": metrics.steps, "seconds_left": metrics.eta_s, **scalars(metrics)}


def describe(metrics: StepMetrics) -> str:
    """One line: where the run is, how well and how fast."""
    parts = [
        f"step {metrics.step}/{metrics.steps}",
        "skipped (not finite)" if metrics.loss is None else f"loss {metrics.loss:.3f}",
        f"accepted prefix {metrics.accepted_prefix:.2f}",
        f"lr {metrics.learning_rate:.2e}",
        "" if metrics.grad_norm is None else f"gradient {metrics.grad_norm:.2f}",
        f"{metrics.tokens_per_s:,.0f} tokens/s",
        f"waiting {metrics.waiting_share:.0%}",
        f"{_duration(metrics.eta_s)} left",
    ]
    if metrics.held_out_loss is not None and metrics.held_out_accepted_prefix is not None:
        parts.append(f"held out: loss {metrics.held_out_loss:.3f}, prefix {metrics.held_out_accepted_prefix:.2f}")
    if metrics.acceptance_length is not None:
        parts.append(f"acceptance length {metrics.acceptance_length:.2f}")
    return ", ".join(part for part in parts if part)


def _every(seconds: float, show: Report) -> Report:
    """Show at most one step in that time, but each one that validated, was skipped, is first or last."""
    shown_at = -seconds

    def report(metrics: StepMetrics) -> None:
        nonlocal shown_at
        measured = metrics.held_out_loss is not None or metrics.acceptance_length is not None
        special = measured or metrics.skipped or metrics.step in (1, metrics.steps)
        now = time.monotonic()
        if special or now - shown_at >= seconds:
            shown_at = now
            show(metrics)

    return report


@contextmanager
def _bar() -> Iterator[Report]:
    columns = (TextColumn("train"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[numbers]}"))
    with Progress(*columns, console=Console(stderr=True), refresh_per_second=4) as progress:
        task: TaskID | None = None
        held_out = accepted = ""

        def report(metrics: StepMetrics) -> None:
            nonlocal task, held_out, accepted
            if task is None:
                task = progress.add_task("", total=metrics.steps, numbers="")
            if metrics.held_out_accepted_prefix is not None:
                held_out = f" | held out {metrics.held_out_accepted_prefix:.2f}"
            if metrics.acceptance_length is not None:
                accepted = f" | accepted {metrics.acceptance_length:.2f}"
            loss = "skipped" if metrics.loss is None else f"loss {metrics.loss:.3f}"
            numbers = (
                f"{loss} | prefix {metrics.accepted_prefix:.2f}{held_out}{accepted} | "
                f"{metrics.tokens_per_s:,.0f} tok/s, {metrics.waiting_share:.0%} waiting | "
                f"{_duration(metrics.eta_s)} left"
            )
            progress.update(task, completed=metrics.step, numbers=numbers)

        yield report


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
