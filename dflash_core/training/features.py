"""Micro-batches on their way to the drafter: what the host can prepare, and the features that the target makes.

The trade-off: everything that depends on data (anchors, slot targets, chunk bounds) is made on the CPU, ahead of time
and in a thread, so that a step never asks a device for a number. And the target runs ahead of the drafter into feature
buffers (2 bytes x L*H a token each), so that two devices work at the same time.
Shapes: B rows, S tokens, N blocks, L captured layers, H hidden size.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch.profiler import record_function

from dflash_core.batches.loader import Batch
from dflash_core.drafter.anchors import DocumentAnchors, draw_anchors, stack_blocks
from dflash_core.drafter.attention import Blocks
from dflash_core.drafter.objective import SlotTargets, slot_targets
from dflash_core.target.hooked import HookedTarget


@dataclass(frozen=True)
class PreparedBatch:
    """A micro-batch and all that the host can say about it; on the CPU until `to`."""

    batch: Batch
    blocks: Blocks
    targets: SlotTargets
    anchor_tokens: torch.Tensor
    """[B, N] int64, the token of each block's slot 0."""
    positions: torch.Tensor
    """[1, S] int64."""
    files: torch.Tensor
    """[B] int64."""
    lengths: torch.Tensor
    """[B] int64."""

    def to(self, device: torch.device) -> "PreparedBatch":
        """The same with the drafter's inputs on `device`, without waiting for the copies."""
        anchor_tokens, positions, files, lengths = (
            t.to(device, non_blocking=True) for t in (self.anchor_tokens, self.positions, self.files, self.lengths)
        )
        return PreparedBatch(
            self.batch, self.blocks.to(device), self.targets.to(device), anchor_tokens, positions, files, lengths
        )

    def pinned(self) -> "PreparedBatch":
        """The same with everything that travels to a device in pinned memory."""
        anchor_tokens, positions, files, lengths, ids = (
            t.pin_memory() for t in (self.anchor_tokens, self.positions, self.files, self.lengths, self.batch.ids)
        )
        blocks = Blocks(*(t.pin_memory() for t in self.blocks))
        row, label, valid = (t.pin_memory() for t in (self.targets.row, self.targets.label, self.targets.valid))
        targets = self.targets._replace(row=row, label=label, valid=valid)
        return PreparedBatch(replace(self.batch, ids=ids), blocks, targets, anchor_tokens, positions, files, lengths)


@dataclass(frozen=True)
class Preparation:
    """What `prepare` needs besides the batch."""

    seed: int
    anchors: int
    block_size: int
    chunk_rows: int
    pin: bool = False
    """Make tensors in pinned memory, so that copies to a GPU do not hold up the host."""
    least_blocks: int = 1
    """Of a row, padding included; for a drafter on a GPU see `attention.least_blocks`."""


def prepare(batch: Batch, preparation: Preparation) -> PreparedBatch:
    """Draw the anchors of (seed, epoch, row id) and list the supervised slots."""
    masks = batch.loss_mask.numpy()
    documents = []
    for mask, length, row_id in zip(masks, batch.lengths.tolist(), batch.row_ids, strict=True):
        drawn = draw_anchors(
            mask[:length], preparation.anchors, seed=preparation.seed, epoch=batch.epoch, row_id=row_id
        )
        documents.append([DocumentAnchors(0, length, drawn)])
    blocks = stack_blocks(documents, preparation.least_blocks)
    prepared = PreparedBatch(
        batch=batch,
        blocks=blocks,
        targets=slot_targets(batch.ids, batch.loss_mask, blocks, preparation.block_size, preparation.chunk_rows),
        anchor_tokens=batch.ids.gather(1, blocks.anchor),
        positions=torch.arange(batch.ids.shape[1])[None],
        files=batch.files,
        lengths=batch.lengths,
    )
    return prepared.pinned() if preparation.pin else prepared


Event = object
"""A point in a queue that other queues can wait for."""
PASSED: Event = object()
"""An event in the past of every queue."""


class Queue(Protocol):
    """Work in order, on one device, perhaps later."""

    def run(self, work: Callable[[], None]) -> None:
        """Append work."""

    def record(self) -> Event:
        """The point after all work appended so far."""

    def wait(self, event: Event) -> None:
        """Let later work of this queue begin only after the event."""


class HostQueue:
    """Runs everything at once: the CPU, or one GPU whose target and drafter take turns on its current stream."""

    def run(self, work: Callable[[], None]) -> None:
        """Run it now."""
        work()

    def record(self) -> Event:
        """Everything before has run already."""
        return PASSED

    def wait(self, event: Event) -> None:
        """Nothing to wait for."""


class CudaQueue:
    """A CUDA stream, or for copies between two GPUs a side stream on each.

    torch orders a copy between GPUs with the current stream of *both*; with a side stream on the source alone, every
    copy would wait for all the drafter's work.
    """

    def __init__(self, *streams: torch.cuda.Stream) -> None:
        self._streams = streams

    def run(self, work: Callable[[], None]) -> None:
        """Launch on the stream."""
        with ExitStack() as stack:
            for stream in self._streams:
                stack.enter_context(torch.cuda.stream(stream))
            work()

    def record(self) -> Event:
        """A CUDA event of the last stream: a copy between GPUs ends on its destination's."""
        return self._streams[-1].record_event()

    def wait(self, event: Event) -> None:
        """The streams wait, the host does not."""
        if event is PASSED:
            return
        assert isinstance(event, torch.cuda.Event)
        for stream in self._streams:
            stream.wait_event(event)


@dataclass(frozen=True)
class Queues:
    """The three queues that meet at a feature buffer."""

    target: Queue
    copy: Queue
    drafter: Queue


class FeatureBuffer:
    """Memory on the drafter's device that the target fills while the drafter trains; grows to the largest micro-batch.

    The protocol, in this order: the copy queue waits until the buffer is *free*, then, layer by layer, waits until the
    target has made a layer and copies it; then it marks the buffer *ready*. The drafter's queue waits for *ready*, runs
    forward and backward (the weight gradient of `fc` reads the features), then marks the buffer *free*. The host never
    waits.
    """

    def __init__(self, queues: Queues, layers: int, device: torch.device) -> None:
        self._queues = queues
        self._layers = layers
        self._device = device
        self._memory = torch.empty(0, device=device)
        self._view = self._memory
        self._free = PASSED
        self._ready: Event | None = None

    def begin(self, shape: torch.Size, dtype: torch.dtype) -> None:
        """Reserve room for features of a micro-batch whose layers have `shape` [B, S, H]."""
        assert self._ready is None, "a feature buffer must be released before it is filled again"
        B, S, H = shape
        size = B * S * self._layers * H
        if self._memory.numel() < size or self._memory.dtype != dtype:
            # Allocated in the order of the drafter's queue: its memory may still be read by work queued there.
            self._memory = torch.empty(size, dtype=dtype, device=self._device)
            self._free = self._queues.drafter.record()
        self._view = self._memory[:size].view(B, S, self._layers * H)
        self._queues.copy.wait(self._free)

    def put(self, position: int, hidden: torch.Tensor) -> None:
        """Copy layer `position`'s output [B, S, H], as soon as the target's queue has made it."""
        self._queues.copy.wait(self._queues.target.record())
        H = hidden.shape[-1]
        part = self._view[..., position * H : (position + 1) * H]
        self._queues.copy.run(lambda: _copy(part, hidden))

    def finish(self) -> None:
        """All layers are queued."""
        self._ready = self._queues.copy.record()

    def take(self) -> torch.Tensor:
        """Features [B, S, L*H] for work of the drafter's queue."""
        assert self._ready is not None, "a feature buffer must be filled before it is taken"
        self._queues.drafter.wait(self._ready)
        return self._view

    def release(self) -> None:
        """Call after backward: work that the drafter's queue gets from now on does not read the features."""
        self._free = self._queues.drafter.record()
        self._ready = None


def _copy(part: torch.Tensor, hidden: torch.Tensor) -> None:
    part.copy_(hidden, non_blocking=part.is_cuda)
    if hidden.is_cuda:
        # The allocator must not give the layer's memory to the target's next layer while the side stream reads it.
        hidden.record_stream(torch.cuda.current_stream(hidden.device))


class FeatureFeed:
    """Runs the targets ahead of the drafter: one buffer each that is trained on and one that is filled."""

    def __init__(self, targets: Sequence[HookedTarget], drafter: torch.device, buffers_per_target: int) -> None:
        self._targets = targets
        self._drafter = drafter
        lanes = [(target, _queues(target.device, drafter)) for target in targets]
        self._ring = [
            (target, FeatureBuffer(queues, len(target.layer_ids), drafter))
            for _ in range(buffers_per_target)
            for target, queues in lanes
        ]
        self._turn = 0

    def aside(self) -> "FeatureFeed":
        """Another feed of the same targets, for use while this one has micro-batches on their way."""
        return FeatureFeed(self._targets, self._drafter, 1)

    def feed(self, batches: Iterable[PreparedBatch]) -> Iterator[tuple[PreparedBatch, torch.Tensor | None]]:
        """Yield each micro-batch on the drafter's device with its features [B, S, L*H], None for one without rows.

        The features are valid until the next one is asked for: by then backward must have been called.
        """
        waiting: deque[tuple[PreparedBatch, FeatureBuffer | None]] = deque()
        for batch in batches:
            while sum(buffer is not None for _, buffer in waiting) == len(self._ring):
                yield from self._hand_over(waiting.popleft())
            waiting.append((batch, self._fill(batch)))
        while waiting:
            yield from self._hand_over(waiting.popleft())

    def _fill(self, prepared: PreparedBatch) -> FeatureBuffer | None:
        if not prepared.batch.row_ids:
            return None
        if bool(prepared.blocks.start.any()):
            raise ValueError("a target reads one document a row, a packed one would leak; pack for the drafter only")
        target, buffer = self._ring[self._turn % len(self._ring)]
        self._turn += 1
        ids = prepared.batch.ids.to(target.device, non_blocking=True)

        def sink(position: int, hidden: torch.Tensor) -> None:
            if position == 0:
                buffer.begin(hidden.shape, hidden.dtype)
            buffer.put(position, hidden)

        with record_function("target"):
            target.capture(ids, sink)
        buffer.finish()
        return buffer

    def _hand_over(
        self, item: tuple[PreparedBatch, FeatureBuffer | None]
    ) -> Iterator[tuple[PreparedBatch, torch.Tensor | None]]:
        prepared, buffer = item
        if buffer is None:
            yield prepared, None
            return
        yield prepared.to(self._drafter), buffer.take()
        buffer.release()


def _queues(target: torch.device, drafter: torch.device) -> Queues:
    """Real streams between two GPUs; anything else runs in one order."""
    if target == drafter or target.type != "cuda" or drafter.type != "cuda":
        return Queues(HostQueue(), HostQueue(), HostQueue())
    sides = [torch.cuda.Stream(device) for device in (target, drafter)]  # type: ignore[no-untyped-call]
    return Queues(
        target=CudaQueue(torch.cuda.current_stream(target)),
        copy=CudaQueue(*sides),
        drafter=CudaQueue(torch.cuda.current_stream(drafter)),
    )
