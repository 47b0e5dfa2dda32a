"""Trains in a forked process that kills itself, or gets a signal, at its N-th crossing of a moment that matters.

Crossings are before and after every fsync, rename and replace, every object written or deleted, every micro-batch and
every optimizer step. The production code knows nothing of them.
"""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from dflash_core.errors import TrainingStopped
from dflash_core.recipe import Recipe
from dflash_core.storage.s3 import Store
from dflash_core.training.job import Job, StopRequest, stop_on_signals
from dflash_core.training.step import Learner
from dflash_core.training.train import train
from dflash_core.workspace import connect


class Finished(NamedTuple):
    """What a training that was not killed reports."""

    crossings: int
    first_step: int
    weights: str
    """sha256"""


def train_or_die(recipe: Recipe, training_set: str, deadly: int) -> Finished | None:
    """Train in a process of its own; None: it was killed at crossing `deadly` (0: never)."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_train, args=(recipe, training_set, deadly, sender))
    process.start()
    sender.close()
    try:
        finished: Finished | None = receiver.recv()
    except EOFError:
        finished = None
    process.join()
    assert process.exitcode == (0 if finished else -signal.SIGKILL)
    return finished


def _train(recipe: Recipe, training_set: str, deadly: int, sender: Any) -> None:
    torch.set_num_threads(1)
    count = Crossings(deadly)
    os.fsync = count.around(os.fsync)
    os.rename = count.around(os.rename)
    os.replace = count.around(os.replace)
    for name in ("put", "upload", "delete"):
        setattr(Store, name, count.around(getattr(Store, name)))
    torch.optim.AdamW.step = count.around(torch.optim.AdamW.step)  # type: ignore[method-assign]
    Learner.accumulate = count.around(Learner.accumulate)  # type: ignore[method-assign]
    steps: list[int] = []
    checkpoint = train(connect(recipe), Job(training_set), lambda metrics: steps.append(metrics.step))
    sender.send(Finished(count.crossed, steps[0] if steps else 0, checkpoint.weights.sha256))


def interrupt(recipe: Recipe, training_set: str, first: int, second: int = 0) -> tuple[int, int, str]:
    """Train in a process that gets SIGTERM at its crossing `first`, and again at `second` (0: never).

    Returns:
        (exit code, crossings, error)
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_interrupted, args=(recipe, training_set, (first, second), sender))
    process.start()
    sender.close()
    try:
        crossings, error = receiver.recv()
    except EOFError:
        crossings, error = 0, ""
    process.join()
    assert process.exitcode is not None
    return process.exitcode, crossings, error


def _interrupted(recipe: Recipe, training_set: str, points: tuple[int, int], sender: Any) -> None:
    torch.set_num_threads(1)
    stop = StopRequest()
    count = Crossings(*points, sent=signal.SIGTERM, arrived=lambda: stop.asked)
    os.fsync = count.around(os.fsync)
    os.rename = count.around(os.rename)
    os.replace = count.around(os.replace)
    try:
        with stop_on_signals(stop):
            train(connect(recipe), Job(training_set), lambda _: None, stop)
    except TrainingStopped as error:
        sender.send((count.crossed, str(error)))
        os._exit(error.exit_code)
    sender.send((count.crossed, ""))


class Crossings:
    """Wraps functions; the process dies, or is told to stop, before or after the n-th call of any of them."""

    def __init__(
        self, first: int, second: int = 0, sent: int = signal.SIGKILL, arrived: Callable[[], bool] = lambda: True
    ) -> None:
        """`arrived`: whether the first signal was handled; the second waits for it, since equal ones melt into one."""
        self.crossed = 0
        self._first, self._second = first, second
        self._sent, self._arrived = sent, arrived

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            self._cross()
            answer = function(*args, **kwargs)
            self._cross()
            return answer

        return wrapper

    def _cross(self) -> None:
        self.crossed += 1
        if self.crossed in (self._first, self._second):
            while self.crossed == self._second and not self._arrived():
                time.sleep(0.01)
            os.kill(os.getpid(), self._sent)
