"""Feature slots: buffers on the drafter's device that the target fills while the drafter trains on another one.

The protocol, per slot and in this order: the copy queue waits until the slot is *free*, then, layer by layer, waits
until the target has made a layer and copies it; then it marks the slot *ready*. The drafter's queue waits for *ready*,
runs forward and backward (the weight gradient of `fc` reads the features), then marks the slot *free*. No wait is
the host's.
The trade-off: a slot holds the features of one micro-batch, 2 bytes x L*H a token, for the sake of overlap.

Queues are CUDA streams, or nothing at all on a CPU. Shapes: B rows, S tokens, L captured layers, H hidden size.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol

import torch

Event = object
"""A point in a queue that other queues can wait for."""


PASSED: Event = object()
"""An event that lies in the past of every queue."""


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
    """The three queues that meet at a slot."""

    target: Queue
    copy: Queue
    drafter: Queue


class Slot:
    """One buffer, grown to the largest micro-batch it has seen."""

    def __init__(self, queues: Queues, layers: int, device: torch.device) -> None:
        self._queues = queues
        self._layers = layers
        self._device = device
        self._buffer = torch.empty(0, device=device)
        self._view = self._buffer
        self._free = PASSED
        self._ready: Event | None = None

    def begin(self, shape: torch.Size, dtype: torch.dtype) -> None:
        """Reserve room for features of a micro-batch whose layers have `shape` [B, S, H]."""
        assert self._ready is None, "a slot must be released before it is filled again"
        B, S, H = shape
        size = B * S * self._layers * H
        if self._buffer.numel() < size or self._buffer.dtype != dtype:
            # Allocated in the order of the drafter's queue: its memory may still be read by work queued there.
            self._buffer = torch.empty(size, dtype=dtype, device=self._device)
            self._free = self._queues.drafter.record()
        self._view = self._buffer[:size].view(B, S, self._layers * H)
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
        assert self._ready is not None, "a slot must be filled before it is taken"
        self._queues.drafter.wait(self._ready)
        return self._view

    def release(self) -> None:
        """Call after backward: the drafter's queue reads the features no more."""
        self._free = self._queues.drafter.record()
        self._ready = None


def _copy(part: torch.Tensor, hidden: torch.Tensor) -> None:
    part.copy_(hidden, non_blocking=part.is_cuda)
    if hidden.is_cuda:
        hidden.record_stream(torch.cuda.current_stream(hidden.device))
