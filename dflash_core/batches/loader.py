"""Right-padded batches in the global order, for one rank of any number, from any step on.

The trade-off: a position is one number (the optimizer step), because order is recomputed from the seed, not saved.
Shapes: B rows of a micro-batch, S tokens of its longest row.
"""

import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from types import TracebackType
from typing import Generic, TypeVar

import numpy as np
import torch

from dflash_core.batches.order import Rows, epoch_order, epoch_steps, is_held_out, micro_batch
from dflash_core.batches.rows import RowStore

Item = TypeVar("Item")


@dataclass(frozen=True)
class Batch:
    """A micro-batch of one rank. It may have no row: the last step of an epoch need not fill every rank."""

    step: int
    """The optimizer step it belongs to, counted from 0 over all epochs."""
    epoch: int
    last: bool
    """Whether the rank's gradient of this step is complete after it."""
    row_ids: tuple[str, ...]
    files: torch.Tensor
    """[B] int64, index of each row's partition."""
    ids: torch.Tensor
    """[B, S] int64, zero after a row's end."""
    lengths: torch.Tensor
    """[B] int64, tokens of each row."""
    loss_mask: torch.Tensor
    """[B, S] bool, false after a row's end."""


@dataclass(frozen=True)
class RowSplit:
    """Row indices of training and of validation: disjoint and together complete."""

    training: Rows
    held_out: Rows


def split_rows(rows: RowStore, seed: int, held_out_share: float) -> RowSplit:
    """Divide the rows by seed and conversation."""
    held_out = np.fromiter((is_held_out(seed, c, held_out_share) for c in rows.conversations), np.bool_, len(rows))
    return RowSplit(np.flatnonzero(~held_out), np.flatnonzero(held_out))


@dataclass(frozen=True)
class StepShape:
    """How the rows of an optimizer step are shared out."""

    batch_rows: int
    accumulation: int = 1
    rank: int = 0
    ranks: int = 1

    @property
    def step_rows(self) -> int:
        """Rows of an optimizer step over all ranks."""
        return self.batch_rows * self.accumulation * self.ranks


class Loader:
    """Micro-batches of one rank over some rows of a row store."""

    def __init__(self, rows: RowStore, subset: Rows, seed: int, shape: StepShape) -> None:
        self.rows = rows
        self.subset = subset
        self.seed = seed
        self.shape = shape
        self._order: tuple[int, list[Rows]] = (-1, [])

    @cached_property
    def epoch_steps(self) -> int:
        """Optimizer steps of an epoch."""
        return epoch_steps(len(self.subset), self.shape.step_rows)

    def batches(self, first_step: int, end_step: int) -> Iterator[Batch]:
        """The rank's micro-batches of steps `first_step` .. `end_step` - 1, each step closed by one with `last` set."""
        for step in range(first_step, end_step):
            yield from self.step_batches(step)

    def step_batches(self, step: int) -> Iterator[Batch]:
        """The rank's micro-batches of one step: `accumulation` of them, or fewer if the others would be empty."""
        epoch, index = divmod(step, self.epoch_steps)
        rows, shape = self._epoch(epoch)[index], self.shape
        turns = -(-len(rows) // (shape.batch_rows * shape.ranks))
        for turn in range(turns):
            part = micro_batch(rows, turn * shape.ranks + shape.rank, shape.batch_rows)
            yield collate(self.rows, self.subset[part], step, epoch, turn == turns - 1)

    def _epoch(self, epoch: int) -> list[Rows]:
        if self._order[0] != epoch:
            row_ids = [self.rows.row_ids[i] for i in self.subset]
            lengths = self.rows.lengths[self.subset]
            self._order = (epoch, epoch_order(row_ids, lengths, self.seed, epoch, self.shape.step_rows))
        return self._order[1]


def held_out_batches(rows: RowStore, held_out: Rows, shape: StepShape) -> list[Batch]:
    """The rank's share of the held-out rows, sorted by length; always epoch 0, so that every validation is the same."""
    ordered = held_out[np.argsort(rows.lengths[held_out], kind="stable")]
    count = -(-len(ordered) // shape.batch_rows)
    parts = (micro_batch(ordered, index, shape.batch_rows) for index in range(shape.rank, count, shape.ranks))
    return [collate(rows, part, 0, 0, True) for part in parts]


def collate(rows: RowStore, indices: Rows, step: int, epoch: int, last: bool) -> Batch:
    """Pad the rows on the right."""
    picked = [rows.row(int(i)) for i in indices]
    width = max((len(tokens) for tokens, _ in picked), default=0)
    ids = np.zeros((len(picked), width), dtype=np.int64)
    loss_mask = np.zeros((len(picked), width), dtype=np.bool_)
    for line, (tokens, mask) in enumerate(picked):
        ids[line, : len(tokens)] = tokens
        loss_mask[line, : len(tokens)] = mask
    return Batch(
        step=step,
        epoch=epoch,
        last=last,
        row_ids=tuple(rows.row_ids[int(i)] for i in indices),
        files=torch.from_numpy(rows.files[indices]),
        ids=torch.from_numpy(ids),
        lengths=torch.tensor([len(tokens) for tokens, _ in picked], dtype=torch.int64),
        loss_mask=torch.from_numpy(loss_mask),
    )


class Prefetch(Generic[Item]):
    """Runs an iterator in a thread, `depth` items ahead, and measures how long its reader had to wait.

    Use as a context manager: leaving it ends the thread. What the iterator raises, the reader gets.
    """

    def __init__(self, source: Iterator[Item], depth: int) -> None:
        self.waited_s = 0.0
        self._source = source
        self._stop = threading.Event()
        self._items: queue.Queue[tuple[Item] | Exception | None] = queue.Queue(maxsize=depth)
        self._thread = threading.Thread(target=self._fill, name="prefetch", daemon=True)

    def __enter__(self) -> "Prefetch[Item]":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        while self._thread.is_alive():
            try:
                self._items.get_nowait()
            except queue.Empty:
                self._thread.join(timeout=0.01)

    def __iter__(self) -> Iterator[Item]:
        while True:
            asked = time.monotonic()
            item = self._items.get()
            self.waited_s += time.monotonic() - asked
            if item is None:
                return
            if isinstance(item, Exception):
                raise item
            yield item[0]

    def _fill(self) -> None:
        try:
            for item in self._source:
                self._items.put((item,))
                if self._stop.is_set():
                    return
            self._items.put(None)
        except Exception as error:  # noqa: BLE001  handed to the reader, who raises it
            self._items.put(error)
