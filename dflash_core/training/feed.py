"""Micro-batches on their way to the drafter: what can be prepared on the host, and the features from the target.

The trade-off: everything that depends on data (anchors, slot targets, chunk bounds) is made on the CPU, ahead of time
and in a thread, so that the step itself never asks a device for a number.
Shapes: B rows, S tokens, N blocks, L captured layers, H hidden size.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch.profiler import record_function

from dflash_core.batches.loader import Batch
from dflash_core.drafter.anchors import DocumentAnchors, draw_anchors, stack_blocks
from dflash_core.drafter.objective import SlotTargets, slot_targets
from dflash_core.drafter.visibility import Blocks
from dflash_core.training.slots import CudaQueue, HostQueue, Queues, Slot
from dflash_core.training.target import Target


@dataclass(frozen=True)
class Work:
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

    def to(self, device: torch.device) -> "Work":
        """The same with the drafter's inputs on `device`, without waiting for the copies."""
        anchor_tokens, positions, files, lengths = (
            t.to(device, non_blocking=True) for t in (self.anchor_tokens, self.positions, self.files, self.lengths)
        )
        return Work(
            self.batch, self.blocks.to(device), self.targets.to(device), anchor_tokens, positions, files, lengths
        )

    def pinned(self) -> "Work":
        """The same with everything that travels to a device in pinned memory."""
        anchor_tokens, positions, files, lengths, ids = (
            t.pin_memory() for t in (self.anchor_tokens, self.positions, self.files, self.lengths, self.batch.ids)
        )
        blocks = Blocks(*(t.pin_memory() for t in self.blocks))
        row, label, valid = (t.pin_memory() for t in (self.targets.row, self.targets.label, self.targets.valid))
        targets = self.targets._replace(row=row, label=label, valid=valid)
        return Work(replace(self.batch, ids=ids), blocks, targets, anchor_tokens, positions, files, lengths)


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
    """Of a row, padding included; for a drafter on a GPU see `visibility.least_blocks`."""


def prepare(batch: Batch, preparation: Preparation) -> Work:
    """Draw the anchors of (seed, epoch, row id) and list the supervised slots."""
    masks = batch.loss_mask.numpy()
    documents = []
    for mask, length, row_id in zip(masks, batch.lengths.tolist(), batch.row_ids, strict=True):
        drawn = draw_anchors(
            mask[:length], preparation.anchors, seed=preparation.seed, epoch=batch.epoch, row_id=row_id
        )
        documents.append([DocumentAnchors(0, length, drawn)])
    blocks = stack_blocks(documents, preparation.least_blocks)
    work = Work(
        batch=batch,
        blocks=blocks,
        targets=slot_targets(batch.ids, batch.loss_mask, blocks, preparation.block_size, preparation.chunk_rows),
        anchor_tokens=batch.ids.gather(1, blocks.anchor),
        positions=torch.arange(batch.ids.shape[1])[None],
        files=batch.files,
        lengths=batch.lengths,
    )
    return work.pinned() if preparation.pin else work


class FeatureFeed:
    """Runs the targets ahead of the drafter, one slot each in training and one being filled."""

    def __init__(self, targets: Sequence[Target], drafter: torch.device, slots_per_target: int) -> None:
        self._targets = targets
        self._drafter = drafter
        lanes = [(target, _queues(target.device, drafter)) for target in targets]
        self._ring = [
            (target, Slot(queues, len(target.layer_ids), drafter))
            for _ in range(slots_per_target)
            for target, queues in lanes
        ]
        self._turn = 0

    def aside(self) -> "FeatureFeed":
        """Another feed of the same targets, for use while this one has micro-batches on their way."""
        return FeatureFeed(self._targets, self._drafter, 1)

    def feed(self, works: Iterable[Work]) -> Iterator[tuple[Work, torch.Tensor | None]]:
        """Yield each micro-batch on the drafter's device with its features [B, S, L*H], None for one without rows.

        The features are valid until the next one is asked for: by then backward must have been called.
        """
        waiting: deque[tuple[Work, Slot | None]] = deque()
        for work in works:
            while sum(slot is not None for _, slot in waiting) == len(self._ring):
                yield from self._hand_over(waiting.popleft())
            waiting.append((work, self._fill(work)))
        while waiting:
            yield from self._hand_over(waiting.popleft())

    def _fill(self, work: Work) -> Slot | None:
        if not work.batch.row_ids:
            return None
        if bool(work.blocks.start.any()):
            raise ValueError("a target reads one document a row, a packed one would leak; pack for the drafter only")
        target, slot = self._ring[self._turn % len(self._ring)]
        self._turn += 1
        ids = work.batch.ids.to(target.device, non_blocking=True)

        def sink(position: int, hidden: torch.Tensor) -> None:
            if position == 0:
                slot.begin(hidden.shape, hidden.dtype)
            slot.put(position, hidden)

        with record_function("target"):
            target.capture(ids, sink)
        slot.finish()
        return slot

    def _hand_over(self, item: tuple[Work, Slot | None]) -> Iterator[tuple[Work, torch.Tensor | None]]:
        work, slot = item
        if slot is None:
            yield work, None
            return
        yield work.to(self._drafter), slot.take()
        slot.release()


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
