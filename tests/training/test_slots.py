"""The slot protocol under queues that run late: who reads before *ready* or writes before *free* is caught."""

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from dflash_core.training.slots import PASSED, Event, HostQueue, Queues, Slot, _copy

LAYERS, SHAPE = 3, torch.Size((2, 5, 4))


class LateQueue:
    """A stream: work runs in order, in a thread, each piece a random moment late."""

    def __init__(self, seed: int, longest_s: float) -> None:
        self._random = random.Random(seed)
        self._longest_s = longest_s
        self._work: list[Callable[[], None]] = []
        self._changed = threading.Condition()
        self._open = True
        self.errors: list[str] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def run(self, work: Callable[[], None]) -> None:
        with self._changed:
            self._work.append(work)
            self._changed.notify()

    def record(self) -> Event:
        event = threading.Event()
        self.run(event.set)
        return event

    def wait(self, event: Event) -> None:
        if event is not PASSED:
            assert isinstance(event, threading.Event)
            self.run(lambda: self._await(event))

    def close(self) -> None:
        event = self.record()
        assert isinstance(event, threading.Event)
        self._await(event)
        with self._changed:
            self._open = False
            self._changed.notify()
        self._thread.join(5)

    def _await(self, event: threading.Event) -> None:
        if not event.wait(10):
            self.errors.append("an event never came")

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._work or not self._open)
                if not self._work:
                    return
                work = self._work.pop(0)
            time.sleep(self._random.random() * self._longest_s)
            work()


@contextmanager
def late_queues(seed: int) -> Iterator[tuple[Queues, list[LateQueue]]]:
    late = [LateQueue(seed * 3 + i, 0.008 if seed % 3 == i else 0.001) for i in range(3)]  # one lags behind the others
    try:
        yield Queues(*late), late
    finally:
        for queue in late:
            queue.close()
            assert not queue.errors


def pipeline(queues: Queues, slots: list[Slot], batches: int) -> list[str]:
    """The target fills slots ahead of a drafter that reads each twice, as backward makes it; returns what is wrong."""
    wrong: list[str] = []
    waiting: list[tuple[int, Slot]] = []

    def fill(number: int) -> Slot:
        slot = slots[number % len(slots)]
        slot.begin(SHAPE, torch.float32)
        for layer in range(LAYERS):
            hidden = torch.zeros(SHAPE)
            queues.target.run(lambda hidden=hidden, layer=layer: hidden.fill_(number * 10 + layer + 1))  # type: ignore[misc]
            slot.put(layer, hidden)
        slot.finish()
        return slot

    def read(number: int, features: torch.Tensor, when: str) -> None:
        expected = torch.arange(1, LAYERS + 1).repeat_interleave(SHAPE[-1]) + number * 10.0
        if not torch.equal(features, expected.expand(features.shape)):
            wrong.append(f"batch {number} {when}")

    def train(number: int, slot: Slot) -> None:
        features = slot.take()
        queues.drafter.run(lambda: read(number, features, "forward"))
        queues.drafter.run(lambda: read(number, features, "backward"))
        slot.release()

    for number in range(batches):
        if len(waiting) == len(slots):
            train(*waiting.pop(0))
        waiting.append((number, fill(number)))
    for item in waiting:
        train(*item)
    return wrong


def run(kind: type[Slot], count: int, seed: int, batches: int = 8) -> list[str]:
    with late_queues(seed) as (queues, _):
        return pipeline(queues, [kind(queues, LAYERS, torch.device("cpu")) for _ in range(count)], batches)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_drafter_reads_what_the_target_made_for_it(count: int) -> None:
    for seed in range(4):
        assert run(Slot, count, seed) == []


class NotFreed(Slot):
    """Filled again without waiting for backward."""

    def release(self) -> None:
        super().release()
        self._free = PASSED


class NotReady(Slot):
    """Read without waiting for the copies."""

    def take(self) -> torch.Tensor:
        assert self._ready is not None
        return self._view


class NotMade(Slot):
    """Copied without waiting for the target's layer."""

    def put(self, position: int, hidden: torch.Tensor) -> None:
        H = hidden.shape[-1]
        part = self._view[..., position * H : (position + 1) * H]
        self._queues.copy.run(lambda: _copy(part, hidden))


@pytest.mark.parametrize("broken", [NotFreed, NotReady, NotMade])
def test_each_missing_wait_is_caught(broken: type[Slot]) -> None:
    assert any(run(broken, 2, seed) for seed in range(6))


def test_a_slot_out_of_turn_is_a_programming_error() -> None:
    host = HostQueue()
    slot = Slot(Queues(host, host, host), LAYERS, torch.device("cpu"))
    with pytest.raises(AssertionError, match="filled before it is taken"):
        slot.take()
    slot.begin(SHAPE, torch.float32)
    slot.finish()
    with pytest.raises(AssertionError, match="released before it is filled again"):
        slot.begin(SHAPE, torch.float32)


def test_a_slot_grows_and_keeps_batches_of_other_shapes_apart() -> None:
    host = HostQueue()
    slot = Slot(Queues(host, host, host), 2, torch.device("cpu"))
    for B, S, H in ((1, 3, 4), (2, 7, 4), (2, 2, 4)):
        slot.begin(torch.Size((B, S, H)), torch.float64)
        layers = [torch.randn(B, S, H, dtype=torch.float64) for _ in range(2)]
        for position, hidden in enumerate(layers):
            slot.put(position, hidden)
        slot.finish()
        assert torch.equal(slot.take(), torch.cat(layers, -1))
        slot.release()
