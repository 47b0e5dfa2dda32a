"""Where a run's numbers go besides its own JSON lines: TensorBoard, Weights & Biases, MLflow, each through its package.

The trade-off: a tracker sees what the JSON lines hold and nothing else, so one that is missing costs no knowledge; a
missing package or server is refused before the first step, and an outage after it costs points of that tracker's curve
and never the training: TensorBoard and W&B write to this disk first, for MLflow a thread sends.
"""

import importlib
import logging
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from dflash_core.errors import RecipeError
from dflash_core.training.metrics import OnStep, StepMetrics

log = logging.getLogger(__name__)

PROJECT = "dflash"
WAITING_STEPS = 1000
"""So many steps wait for a server that is slow; more are dropped."""
CLOSING_S = 30.0
"""How long the end of a training waits for them."""


@contextmanager
def open_trackers(names: Sequence[str], run: str, folder: Path, steps_done: int) -> Iterator[OnStep]:
    """A function that sends a step to each tracker.

    Args:
        names: of the recipe's training.trackers.
        run: the run's name; the same name continues the same curve.
        folder: the run's own, for trackers that keep files.
        steps_done: a continued run's; later points of an attempt that crashed are replaced where the tracker can.

    Raises:
        RecipeError: a package is not installed, or MLflow's server does not answer.
    """
    with ExitStack() as stack:
        trackers = [stack.enter_context(_TRACKERS[name](run, folder, steps_done)) for name in names]

        def track(metrics: StepMetrics) -> None:
            values = metrics.scalars()
            for tracker in trackers:
                tracker(values, metrics.step)

        yield track


Log = Callable[[dict[str, float], int], None]
"""(values, step)"""


@contextmanager
def _tensorboard(run: str, folder: Path, steps_done: int) -> Iterator[Log]:
    """Event files in <run folder>/tensorboard."""
    del run
    package = _package("torch.utils.tensorboard", "tensorboard")
    writer = package.SummaryWriter(str(folder / "tensorboard"), purge_step=steps_done + 1, max_queue=1000)

    def write(values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    try:
        yield write
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
    failure = package.exceptions.MlflowException
    entities = importlib.import_module("mlflow.entities")
    try:
        client = package.MlflowClient()
        experiment = client.get_experiment_by_name(PROJECT)
        number = experiment.experiment_id if experiment else client.create_experiment(PROJECT)
        found = client.search_runs([number], f"attributes.run_name = '{run}'", max_results=1)
        opened = (found[0] if found else client.create_run(number, run_name=run)).info.run_id
        client.update_run(opened, status="RUNNING")
    except failure as error:
        raise RecipeError(
            f"training.trackers: MLflow at {package.get_tracking_uri()} cannot be used: {error}; start it, set "
            "MLFLOW_TRACKING_URI to another, or take mlflow out of the recipe"
        ) from None

    def send(values: dict[str, float], step: int) -> None:
        client.log_batch(opened, [entities.Metric(name, value, 0, step) for name, value in values.items()])

    sender = _Sender("MLflow", send, lambda: client.set_terminated(opened), failure)
    try:
        yield sender.put
    finally:
        sender.close()


class _Sender:
    """Sends steps from a thread; what a server does not take is dropped, counted and told."""

    def __init__(self, name: str, send: Log, end: Callable[[], None], failure: type[Exception]) -> None:
        """`failure`: what `send` and `end` raise when the server does not answer."""
        self._name, self._send, self._end, self._failure = name, send, end, failure
        self._waiting: queue.SimpleQueue[tuple[dict[str, float], int] | None] = queue.SimpleQueue()
        self._dropped = 0
        self._counting = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, values: dict[str, float], step: int) -> None:
        """Send a step soon; returns at once."""
        if self._waiting.qsize() < WAITING_STEPS:
            self._waiting.put((values, step))
        else:
            self._drop(f"{WAITING_STEPS} steps wait for it")

    def close(self) -> None:
        """Send what waits and end the curve, in no more than `CLOSING_S`."""
        self._waiting.put(None)
        self._thread.join(CLOSING_S)
        lacking = self._dropped + (self._waiting.qsize() if self._thread.is_alive() else 0)
        if lacking:
            log.warning("%s lacks %d steps of this training; its metrics.jsonl has all", self._name, lacking)

    def _run(self) -> None:
        while (step := self._waiting.get()) is not None:
            try:
                self._send(*step)
            except self._failure as error:
                self._drop(str(error))
        try:
            self._end()
        except self._failure as error:
            log.warning("%s was not told that this training ended (%s)", self._name, error)

    def _drop(self, why: str) -> None:
        with self._counting:
            self._dropped += 1
            first = self._dropped == 1
        if first:
            log.warning("%s does not take a step's numbers (%s); training goes on, and tries the next", self._name, why)


def _package(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise RecipeError(
            f"training.trackers needs the package {package}, which is not installed here; install it or take the "
            "tracker out of the recipe"
        ) from None


_TRACKERS = {"tensorboard": _tensorboard, "wandb": _wandb, "mlflow": _mlflow}
