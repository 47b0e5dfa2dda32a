"""What is prepared for the way to a GPU; and feature buffers under queues that run late.

Who reads before *ready* or writes before *free* is caught.
"""

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from dflash_core.batches.loader import Batch
from dflash_core.drafter.anchors import DocumentAnchors, stack_blocks
from dflash_core.drafter.attention import TILE
from dflash_core.recipe import Recipe
from dflash_core.target.hooked import Sink, load_target
from dflash_core.training import features
from dflash_core.training.features import (
    PASSED,
    Event,
    FeatureBuffer,
    FeatureFeed,
    HostQueue,
    Preparation,
    PreparedBatch,
    Queues,
    _copy,
    prepare,
)
from dflash_core.training.placement import RankPlacement
from dflash_core.training.train import make_data
from tests.training.conftest import random_rows, row_store
from tests.training.test_step import CONFIG, CPU, PREPARATION, full_batch

LAYERS, WIDTH = 3, 4


@pytest.fixture
def prepared() -> PreparedBatch:
    return prepare(full_batch(row_store({"a": random_rows(0, 8)})), PREPARATION)


def test_a_packed_row_is_refused(prepared: PreparedBatch, target_folder: Path) -> None:
    """Linear attention (Qwen3.5) would carry one document into the next, and nothing would be seen of it."""
    target = load_target(target_folder, CONFIG.target_layer_ids, torch.float32, CPU)
    documents = [[DocumentAnchors(0, 10, np.array([2])), DocumentAnchors(10, 20, np.array([3]))]] * 4
    packed = PreparedBatch(**{**vars(prepared), "blocks": stack_blocks(documents)})
    with pytest.raises(ValueError, match="one document a row"):
        next(FeatureFeed([target], CPU, 1).feed([packed]))


def test_all_that_travels_is_pinned_for_a_gpu_and_nothing_else_changes(
    prepared: PreparedBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned: list[int] = []

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        copy = tensor.clone()
        pinned.append(id(copy))
        kept.append(copy)
        return copy

    kept: list[torch.Tensor] = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    for_gpu = prepare(prepared.batch, Preparation(**{**vars(PREPARATION), "pin": True}))
    travels = [for_gpu.batch.ids, *for_gpu.blocks, *for_gpu.targets[:3]]
    travels += [for_gpu.anchor_tokens, for_gpu.positions, for_gpu.files, for_gpu.lengths]
    assert all(id(tensor) in pinned for tensor in travels)
    plain = [prepared.batch.ids, *prepared.blocks, *prepared.targets[:3]]
    plain += [prepared.anchor_tokens, prepared.positions, prepared.files, prepared.lengths]
    assert all(torch.equal(a, b) for a, b in zip(travels, plain, strict=True))
    assert for_gpu.targets.bounds == prepared.targets.bounds
    assert len(pinned) == len(travels)
    prepare(prepared.batch, PREPARATION)
    assert len(pinned) == len(travels)  # on a CPU nothing is pinned


@pytest.mark.parametrize(("drafter", "fewest"), [("cpu", 1), ("cuda", 128 // 4 + 1)])
def test_on_a_gpu_a_row_of_few_anchors_has_as_many_tiles_as_others(
    drafter: str, fewest: int, make_recipe: Callable[..., Recipe]
) -> None:
    """Else one rank compiles a kernel in the midst of a step, and the others take it for dead."""
    placement = RankPlacement(0, 1, torch.device(drafter), (CPU,))
    rows = row_store({"a": [("a:1", list(range(30)), [(10, 12)])]})  # one token may be an anchor
    data = make_data(rows, make_recipe(held_out_share=0.0, batch_rows=1), CONFIG, placement)
    preparation = replace(data.preparation, pin=False)
    prepared = prepare(next(data.loader.batches(0, 1)), preparation)
    assert prepared.blocks.anchor.shape == (1, fewest)
    assert prepared.blocks.valid.sum() == 1
    assert (fewest - 1) * CONFIG.block_size in (0, TILE)


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


class LateTarget:
    """Layer j of batch n is n * 10 + j + 1 throughout, and is made late."""

    device = CPU
    layer_ids = tuple(range(LAYERS))

    def __init__(self, queue: LateQueue, begun: list[int]) -> None:
        self._queue = queue
        self._begun = begun

    def capture(self, ids: torch.Tensor, sink: Sink) -> None:
        number = int(ids[0, 0])
        self._begun.append(number)
        for layer in range(LAYERS):
            hidden = torch.zeros(*ids.shape, WIDTH)
            self._queue.run(lambda hidden=hidden, layer=layer: hidden.fill_(number * 10 + layer + 1))  # type: ignore[misc]
            sink(layer, hidden)


def batch_of(number: int) -> PreparedBatch:
    """All ids are the batch's number; shapes differ, and one batch in five has no row."""
    ids = torch.full((0 if number % 5 == 3 else 2, 5 + number % 3), number)
    files, lengths = torch.zeros(len(ids), dtype=torch.int64), torch.full((len(ids),), ids.shape[1])
    row_ids = tuple(f"{number}:{row}" for row in range(len(ids)))
    return prepare(Batch(number, 0, True, row_ids, files, ids, lengths, ids >= 0), PREPARATION)


class Trained(NamedTuple):
    """What a drafter saw that reads features twice: in forward, and in backward for the weight gradient of `fc`."""

    order: list[int]
    """The batches as they came."""
    wrong: list[str]
    """Reads that gave something else than the target made for the batch."""
    begun: list[list[int]]
    """What the target had been given when each batch came."""


def train(seed: int, buffers: int = 2, targets: int = 1, batches: int = 10) -> Trained:
    """The feed of production between queues that run late."""
    seen = Trained([], [], [])
    begun: list[int] = []
    late = [LateQueue(seed * 9 + i, 0.008 if seed % 3 == min(i, 2) else 0.001) for i in range(1 + 2 * targets)]
    drafter, sides = late[0], late[1:]
    lanes = iter([Queues(sides[2 * i], sides[2 * i + 1], drafter) for i in range(targets)])

    def read(number: int, features: torch.Tensor, when: str) -> None:
        expected = torch.arange(1, LAYERS + 1).repeat_interleave(WIDTH) + number * 10.0
        if not torch.equal(features, expected.expand(features.shape)):
            seen.wrong.append(f"batch {number} {when}")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(features, "_queues", lambda _target, _drafter: next(lanes))
        fakes: Any = [LateTarget(sides[2 * i], begun) for i in range(targets)]
        for prepared, given in FeatureFeed(fakes, CPU, buffers).feed(batch_of(n) for n in range(batches)):
            number = prepared.batch.step
            seen.order.append(number)
            seen.begun.append(list(begun))
            if given is not None:
                for when in ("forward", "backward"):
                    drafter.run(lambda f=given, n=number, w=when: read(n, f, w))  # type: ignore[misc]
    for queue in (*sides, drafter):
        queue.close()
        assert not queue.errors
    return seen


@pytest.mark.parametrize(("buffers", "targets"), [(1, 1), (2, 1), (3, 1), (2, 2)])
def test_the_drafter_reads_what_the_target_made_for_it(buffers: int, targets: int) -> None:
    for seed in range(4):
        seen = train(seed, buffers, targets)
        assert seen.wrong == []
        assert seen.order == list(range(10))


@pytest.mark.parametrize(("buffers", "targets"), [(2, 1), (3, 1), (1, 2), (2, 2)])
def test_the_target_is_as_many_batches_ahead_as_there_are_buffers(buffers: int, targets: int) -> None:
    """target(t+1) has its work before the drafter gets batch t: only so can the two run at once."""
    seen = train(0, buffers, targets)
    filled = [n for n in range(10) if batch_of(n).batch.row_ids]
    for number, begun in zip(seen.order, seen.begun, strict=True):
        done = sum(n < number for n in filled)
        assert len(begun) >= min(done + buffers * targets, len(filled)), f"batch {number} came when {begun} had begun"
        assert begun == filled[: len(begun)]


class NotFreed(FeatureBuffer):
    """Filled again without waiting for backward."""

    def release(self) -> None:
        super().release()
        self._free = PASSED


class FreedEarly(FeatureBuffer):
    """Freed once it is taken, with backward still to come."""

    def take(self) -> torch.Tensor:
        features = super().take()
        super().release()
        return features

    def release(self) -> None:
        pass


class NotReady(FeatureBuffer):
    """Read without waiting for the copies."""

    def take(self) -> torch.Tensor:
        assert self._ready is not None
        return self._view


class NotMade(FeatureBuffer):
    """Copied without waiting for the target's layer."""

    def put(self, position: int, hidden: torch.Tensor) -> None:
        H = hidden.shape[-1]
        part = self._view[..., position * H : (position + 1) * H]
        self._queues.copy.run(lambda: _copy(part, hidden))


@pytest.mark.parametrize("broken", [NotFreed, FreedEarly, NotReady, NotMade])
def test_each_missing_wait_is_caught(broken: type[FeatureBuffer], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "FeatureBuffer", broken)
    assert any(train(seed).wrong for seed in range(6))


def test_a_buffer_out_of_turn_is_a_programming_error() -> None:
    host = HostQueue()
    buffer = FeatureBuffer(Queues(host, host, host), LAYERS, CPU)
    with pytest.raises(AssertionError, match="filled before it is taken"):
        buffer.take()
    buffer.begin(torch.Size((2, 5, WIDTH)), torch.float32)
    buffer.finish()
    with pytest.raises(AssertionError, match="released before it is filled again"):
        buffer.begin(torch.Size((2, 5, WIDTH)), torch.float32)


def test_a_buffer_grows_and_keeps_batches_of_other_shapes_apart() -> None:
    host = HostQueue()
    buffer = FeatureBuffer(Queues(host, host, host), 2, CPU)
    for B, S, H in ((1, 3, 4), (2, 7, 4), (2, 2, 4)):
        buffer.begin(torch.Size((B, S, H)), torch.float64)
        layers = [torch.randn(B, S, H, dtype=torch.float64) for _ in range(2)]
        for position, hidden in enumerate(layers):
            buffer.put(position, hidden)
        buffer.finish()
        assert torch.equal(buffer.take(), torch.cat(layers, -1))
        buffer.release()


class CountingQueue:
    """An event is how much work there was before it."""

    def __init__(self) -> None:
        self.work, self.waited_for = 0, list[Event]()

    def run(self, work: Callable[[], None]) -> None:
        self.work += 1

    def record(self) -> Event:
        return self.work

    def wait(self, event: Event) -> None:
        self.waited_for.append(event)


def test_a_grown_buffer_waits_for_all_that_its_new_memory_may_have_been_before() -> None:
    """An allocator gives out what the drafter's queue has freed, though its last readers may still be waiting there."""
    drafter, copy = CountingQueue(), CountingQueue()
    buffer = FeatureBuffer(Queues(CountingQueue(), copy, drafter), 1, CPU)
    for tokens, waits_for in ((3, 0), (3, 0), (7, 2), (5, 2), (7, 3)):
        buffer.begin(torch.Size((1, tokens, WIDTH)), torch.float32)
        assert copy.waited_for.pop() == waits_for, tokens
        buffer.finish()
        buffer.release()
        drafter.run(lambda: None)


class FakeStream:
    """Notes what is asked of it."""

    def __init__(self, name: str, log: list[str]) -> None:
        self._name, self._log = name, log

    def record_event(self) -> torch.cuda.Event:
        self._log.append(f"{self._name} records")
        return torch.cuda.Event()  # type: ignore[no-untyped-call]

    def wait_event(self, event: torch.cuda.Event) -> None:
        self._log.append(f"{self._name} waits")


def test_between_two_gpus_copies_run_on_a_side_stream_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch orders such a copy with the current stream of both: neither may be the one that computes."""
    log: list[str] = []

    @contextmanager
    def entered(stream: FakeStream) -> Iterator[None]:
        log.append(f"in {stream._name}")
        yield

    monkeypatch.setattr(torch.cuda, "Event", type("Event", (), {}))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: FakeStream(f"side {device}", log))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: FakeStream(f"current {device}", log))
    monkeypatch.setattr(torch.cuda, "stream", entered)
    queues = features._queues(torch.device("cuda:0"), torch.device("cuda:2"))
    made, free = queues.target.record(), queues.drafter.record()
    queues.copy.wait(made)
    queues.copy.wait(free)
    queues.copy.wait(PASSED)
    queues.copy.run(lambda: log.append("copy"))
    queues.drafter.wait(queues.copy.record())
    assert log == [
        *("current cuda:0 records", "current cuda:2 records"),
        *("side cuda:0 waits", "side cuda:2 waits") * 2,
        *("in side cuda:0", "in side cuda:2", "copy"),
        *("side cuda:2 records", "current cuda:2 waits"),
    ]
    for pair in (("cuda:0", "cuda:0"), ("cpu", "cuda:0"), ("cuda:0", "cpu")):
        assert isinstance(features._queues(*map(torch.device, pair)).copy, HostQueue)


@pytest.mark.parametrize(("target_cuda", "drafter_cuda"), [(True, True), (True, False), (False, True), (False, False)])
def test_a_layer_is_kept_until_its_copy_is_done(
    target_cuda: bool, drafter_cuda: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its memory belongs to the target's stream; and a copy to the host may not be left on its way."""
    kept, waited = list[str](), list[bool]()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"current {device}")
    hidden: Any = SimpleNamespace(is_cuda=target_cuda, device="cuda:0", record_stream=kept.append)
    part: Any = SimpleNamespace(is_cuda=drafter_cuda, copy_=lambda _, non_blocking: waited.append(not non_blocking))
    _copy(part, hidden)
    assert kept == (["current cuda:0"] if target_cuda else [])
    assert waited == [not drafter_cuda]
