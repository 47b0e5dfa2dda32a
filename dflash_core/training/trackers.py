"""Where a run's numbers go besides its own JSON lines: TensorBoard, Weights & Biases, MLflow, each through its package.

The trade-off: a tracker sees what the JSON lines hold and nothing else, so one that is missing costs no knowledge; a
missing package is refused before the first step, an outage of a tracker's server is that package's affair.
"""

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from dflash_core.errors import RecipeError
from dflash_core.training.metrics import Report, StepMetrics

PROJECT = "dflash"


@contextmanager
def open_trackers(names: Sequence[str], run: str, folder: Path, steps_done: int) -> Iterator[Report]:
    """A function that sends a step to each tracker.

    Args:
        names: of the recipe's training.trackers.
        run: the run's name; the same name continues the same curve.
        folder: the run's own, for trackers that keep files.
        steps_done: a continued run's; later points of an attempt that crashed are replaced where the tracker can.

    Raises:
        RecipeError: a package is not installed.
    """
    with ExitStack() as stack:
        trackers = [stack.enter_context(_TRACKERS[name](run, folder, steps_done)) for name in names]

        def track(metrics: StepMetrics) -> None:
            values = scalars(metrics)
            for log in trackers:
                log(values, metrics.step)

        yield track


def scalars(metrics: StepMetrics) -> dict[str, float]:
    """Every number of a step by its name in trackers; what the step did not measure is absent."""
    single = {
        "train/loss": metrics.loss,
        "train/accepted_prefix": metrics.accepted_prefix,
        "train/grad_norm": metrics.grad_norm,
        "train/learning_rate": metrics.learning_rate,
        "train/bad_rows": metrics.bad_rows,
        "train/skipped": int(metrics.skipped),
        "held_out/loss": metrics.held_out_loss,
        "held_out/accepted_prefix": metrics.held_out_accepted_prefix,
        "held_out/acceptance_length": metrics.acceptance_length,
        "speed/tokens_per_s": metrics.tokens_per_s,
        "speed/waiting_share": metrics.waiting_share,
    }
    slots = {f"slot_accuracy/{slot:02d}": share for slot, share in enumerate(metrics.slot_accuracy, 1)}
    return {name: float(value) for name, value in {**single, **slots}.items() if value is not None}


Log = Callable[[dict[str, float], int], None]
"""(values, step)"""


@contextmanager
def _tensorboard(run: str, folder: Path, steps_done: int) -> Iterator[Log]:
    """Event files in <run folder>/tensorboard."""
    del run
    package = _package("torch.utils.tensorboard", "tensorboard")
    writer = package.SummaryWriter(str(folder / "tensorboard"), purge_step=steps_done + 1, max_queue=1000)

    def log(values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    try:
        yield log
    finally:
        writer.close()


@contextmanager
def _wandb(run: str, folder: Path, steps_done: int) -> Iterator[Log]:
    """A W&B run of the same id; who logs in and where to is W&B's own configuration."""
    del steps_done
    package = _package("wandb", "wandb")
    opened = package.init(project=PROJECT, id=run, name=run, resume="allow", dir=str(folder))
    try:
        yield lambda values, step: opened.log(values, step=step)
    finally:
        opened.finish()


@contextmanager
def _mlflow(run: str, folder: Path, steps_done: int) -> Iterator[Log]:
    """An MLflow run of the same name; the tracking server is MLflow's own configuration."""
    del folder, steps_done
    package = _package("mlflow", "mlflow-skinny")
    client = package.MlflowClient()
    experiment = client.get_experiment_by_name(PROJECT)
    number = experiment.experiment_id if experiment else client.create_experiment(PROJECT)
    found = client.search_runs([number], f"attributes.run_name = '{run}'", max_results=1)
    opened = found[0] if found else client.create_run(number, run_name=run)
    entities = importlib.import_module("mlflow.entities")

    def log(values: dict[str, float], step: int) -> None:
        metrics = [entities.Metric(name, value, 0, step) for name, value in values.items()]
        client.log_batch(opened.info.run_id, metrics)

    client.update_run(opened.info.run_id, status="RUNNING")
    try:
        yield log
    finally:
        client.set_terminated(opened.info.run_id)


def _package(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise RecipeError(
            f"training.trackers needs the package {package}, which is not installed here; install it or take the "
            "tracker out of the recipe"
        ) from None


_TRACKERS = {"tensorboard": _tensorboard, "wandb": _wandb, "mlflow": _mlflow}
