"""Trains in a forked process that kills itself at its N-th crossing of a moment that matters.

Crossings lie before and after every fsync, rename and replace, every object written or deleted, every optimizer step.
The production code knows nothing of them.
"""

import multiprocessing
import os
import signal
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from dflash_core.recipe import Recipe
from dflash_core.storage.store import Store
from dflash_core.training import recorder, run
from dflash_core.training.run import train_drafter


class Finished(NamedTuple):
    """What a training that was not killed reports."""

    crossings: int
    first_step: int
    weights: str
    """sha256"""


def train(recipe: Recipe, training_set: str, deadly: int) -> Finished | None:
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
    Store.put = count.around(Store.put)  # type: ignore[method-assign]
    torch.optim.AdamW.step = count.around(torch.optim.AdamW.step)  # type: ignore[method-assign]
    for module in (recorder, run):
        module.upload_file = count.around(module.upload_file)  # type: ignore[attr-defined]
    recorder.delete_object = count.around(recorder.delete_object)  # type: ignore[attr-defined]
    steps: list[int] = []
    checkpoint = train_drafter(recipe, training_set, False, lambda metrics: steps.append(metrics.step))
    sender.send(Finished(count.crossed, steps[0] if steps else 0, checkpoint.weights.sha256))


class Crossings:
    """Wraps functions so that the process dies before or after the `deadly`-th call of any of them."""

    def __init__(self, deadly: int) -> None:
        self.crossed = 0
        self._deadly = deadly

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            self._cross()
            answer = function(*args, **kwargs)
            self._cross()
            return answer

        return wrapper

    def _cross(self) -> None:
        self.crossed += 1
        if self.crossed == self._deadly:
            os.kill(os.getpid(), signal.SIGKILL)
