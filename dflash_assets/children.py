"""Core calls that need torch, in child processes: a crash or an out-of-memory kill spares the run worker.

What a child logs goes to the run's log, its output to the run's compute logs. When the run is terminated the child gets
SIGINT and time to save.
"""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import dagster as dg

from dflash_core.errors import UserError
from dflash_core.processes import Parent, run
from dflash_core.records import DrafterCheckpoint, DrafterEval, DrafterExport
from dflash_core.training.job import Job
from dflash_core.training.metrics import StepMetrics
from dflash_core.training.progress import LINE_EVERY_S, describe, every
from dflash_core.training.ranks import train_in_ranks
from dflash_core.workspace import Workspace

Answer = TypeVar("Answer")

STOP_TIMEOUT_S = 120.0
OBSERVED_EVERY_S = 15.0
"""Each observation is an event in Dagster's database."""


def train(context: dg.AssetExecutionContext, workspace: Workspace, job: Job) -> DrafterCheckpoint:
    """Train the drafter; its steps are lines in the run's log and observations of the asset.

    Raises:
        dg.Failure: training refused (its own sentence) or died (which process, and its last lines).
    """
    tell = every(LINE_EVERY_S, lambda metrics: context.log.info(describe(metrics)))
    observe = every(
        OBSERVED_EVERY_S,
        lambda metrics: context.log_event(dg.AssetObservation(context.asset_key, metadata=_numbers(metrics))),
    )

    def on_step(metrics: StepMetrics) -> None:
        tell(metrics)
        observe(metrics)

    with _readable(context):
        return train_in_ranks(workspace, job, on_step)


def evaluate(context: dg.AssetExecutionContext, workspace: Workspace, drafter: str | None) -> DrafterEval:
    """Evaluate a drafter.

    Raises:
        dg.Failure: see `train`.
    """
    return _answer(context, _evaluate, workspace, drafter)


def export(context: dg.AssetExecutionContext, workspace: Workspace, drafter: str | None) -> DrafterExport:
    """Export a drafter.

    Raises:
        dg.Failure: see `train`.
    """
    return _answer(context, _export, workspace, drafter)


def _answer(
    context: dg.AssetExecutionContext,
    function: Callable[[Parent, Workspace, str | None], Answer],
    workspace: Workspace,
    drafter: str | None,
) -> Answer:
    logged_at = -OBSERVED_EVERY_S

    def on_told(progress: tuple[int, int]) -> None:
        nonlocal logged_at
        if time.monotonic() - logged_at > OBSERVED_EVERY_S:
            logged_at = time.monotonic()
            context.log.info("{:,} of {:,} prompts decoded".format(*progress))

    name = context.asset_key.to_user_string()
    with _readable(context):
        answer: Answer = run(function, workspace, drafter, name=name, on_told=on_told, stop_timeout_s=STOP_TIMEOUT_S)
        return answer


def _evaluate(parent: Parent, workspace: Workspace, drafter: str | None) -> DrafterEval:
    from dflash_core.evaluation.evaluate import evaluate_drafter  # imports torch, as the next one does

    return evaluate_drafter(workspace, drafter, lambda done, total: parent.tell((done, total)))


def _export(parent: Parent, workspace: Workspace, drafter: str | None) -> DrafterExport:
    from dflash_core.export.export import export_drafter

    del parent
    return export_drafter(workspace, drafter)


@contextmanager
def _readable(context: dg.AssetExecutionContext) -> Iterator[None]:
    """Log lines of core in the run's log; a refusal as the run's failure."""
    handler, core = _ToRun(context), logging.getLogger("dflash_core")
    level = core.level
    core.addHandler(handler)
    core.setLevel(logging.INFO)
    try:
        yield
    except UserError as error:
        raise dg.Failure(str(error), allow_retries=False) from None
    finally:
        core.removeHandler(handler)
        core.setLevel(level)


class _ToRun(logging.Handler):
    def __init__(self, context: dg.AssetExecutionContext) -> None:
        super().__init__()
        self._context = context

    def emit(self, record: logging.LogRecord) -> None:
        self._context.log.log(record.levelno, record.getMessage())


def _numbers(metrics: StepMetrics) -> dict[str, float]:
    """Where the run is and how well it goes, for the UI's plots; four digits, but all of a count.

    Names as people write them: held_out/loss is "held out loss".
    """
    numbers = {"step": metrics.step, "of steps": metrics.steps, "seconds left": metrics.eta_s, **metrics.scalars()}
    return {
        name.replace("/", " ").replace("_", " "): float(value if float(value).is_integer() else f"{value:.4g}")
        for name, value in numbers.items()
    }
