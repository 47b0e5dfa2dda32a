"""Batches: the same steps for any number of ranks, from any position, and a thread that hides nothing."""

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from dflash_core.batches.loader import Batch, Loader, Prefetch, StepShape, held_out_batches, split_rows
from dflash_core.batches.rows import RowStore, ShardRows, unpack
from dflash_core.shards.arrow import read_shard
from tests.training.conftest import random_rows, row_store, shard_bytes


@pytest.fixture(scope="module")
def rows() -> RowStore:
    return row_store({"a": random_rows(0, 30), "b": random_rows(1, 33)})


def store_of(table: pa.Table) -> RowStore:
    arrays: dict[str, Any] = unpack(table)
    return RowStore(["a"], [ShardRows(**arrays)])


def steps_of(rows: RowStore, shape: tuple[int, int, int], first: int, end: int) -> list[set[str]]:
    """Row ids of each step, gathered from all ranks."""
    batch_rows, accumulation, ranks = shape
    steps: list[set[str]] = [set() for _ in range(first, end)]
    for rank in range(ranks):
        loader = Loader(rows, np.arange(len(rows)), 0, StepShape(batch_rows, accumulation, rank, ranks))
        for batch in loader.batches(first, end):
            assert not steps[batch.step - first] & set(batch.row_ids)
            steps[batch.step - first].update(batch.row_ids)
    return steps


def test_any_split_of_a_step_gives_the_same_steps(rows: RowStore) -> None:
    expected = steps_of(rows, (8, 1, 1), 0, 16)
    assert all(len(step) == 8 for step in expected if len(step) != 7)
    for shape in ((4, 2, 1), (4, 1, 2), (2, 1, 4), (2, 2, 2), (1, 8, 1), (8, 1, 1)):
        assert steps_of(rows, shape, 0, 16) == expected


def test_every_row_is_seen_once_in_each_of_two_epochs(rows: RowStore) -> None:
    steps = steps_of(rows, (4, 1, 2), 0, 16)
    for epoch in (steps[:8], steps[8:]):
        assert sorted(name for step in epoch for name in step) == sorted(rows.row_ids)


def test_a_resume_gives_the_batches_that_were_left(rows: RowStore) -> None:
    loader = Loader(rows, np.arange(len(rows)), 0, StepShape(4, 2))
    whole = [b.row_ids for b in loader.batches(0, 16)]
    for first in range(16):
        fresh = Loader(rows, np.arange(len(rows)), 0, StepShape(4, 2))
        rest = [b.row_ids for b in fresh.batches(first, 16)]
        assert rest == whole[len(whole) - len(rest) :]


def test_all_ranks_close_every_step_also_a_short_one(rows: RowStore) -> None:
    for rank in range(4):
        loader = Loader(rows, np.arange(5), 0, StepShape(2, 2, rank, 4))
        closed = [b.step for b in loader.batches(0, 3) if b.last]
        assert closed == [0, 1, 2]


def test_padding_is_on_the_right_and_never_supervised(rows: RowStore) -> None:
    for batch in Loader(rows, np.arange(len(rows)), 0, StepShape(8)).batches(0, 8):
        assert batch.ids.shape == batch.loss_mask.shape == (len(batch.row_ids), int(batch.lengths.max()))
        for line, name in enumerate(batch.row_ids):
            ids, mask = rows.row(rows.row_ids.index(name))
            length = int(batch.lengths[line])
            assert batch.ids[line, :length].tolist() == ids.tolist()
            assert batch.loss_mask[line, :length].tolist() == mask.tolist()
            assert not batch.loss_mask[line, length:].any()
            assert rows.partitions[batch.files[line]] == ("a" if name.startswith("file0") else "b")


def test_training_and_held_out_rows_are_disjoint_and_complete(rows: RowStore) -> None:
    split = split_rows(rows, 5, 0.3)
    assert len(split.held_out)
    assert sorted([*split.training, *split.held_out]) == list(range(len(rows)))
    seen: list[str] = []
    for rank in range(3):
        for batch in held_out_batches(rows, split.held_out, StepShape(4, 1, rank, 3)):
            seen += batch.row_ids
    assert sorted(seen) == sorted(rows.row_ids[i] for i in split.held_out)


def test_a_conversation_is_never_in_both_parts() -> None:
    table = read_shard(shard_bytes([(f"chat{i // 4}#{i % 4}", [1, 2, 3], [(1, 3)]) for i in range(400)]))
    turns = table.set_column(1, table.schema.field("source_line"), pa.array(np.arange(400) // 4 + 1))
    split = split_rows(store_of(turns), 0, 0.3)
    held_out, training = ({f"chat{i // 4}" for i in part} for part in (split.held_out, split.training))
    assert len(held_out) > 15
    assert not held_out & training


def test_rows_of_their_own_are_held_out_one_by_one_whatever_their_ids_look_like() -> None:
    rows = store_of(read_shard(shard_bytes([(f"gsm8k#{i}", [1, 2, 3], [(1, 3)]) for i in range(400)])))
    assert abs(len(split_rows(rows, 0, 0.3).held_out) - 120) < 40


def test_prefetching_keeps_order_raises_errors_and_measures_waiting() -> None:
    def slow() -> Iterator[int]:
        for number in range(3):
            time.sleep(0.1)
            yield number
        raise ValueError("the disk is gone")

    got: list[int] = []
    with Prefetch(slow(), 2) as items, pytest.raises(ValueError, match="the disk is gone"):
        got.extend(items)
    assert got == [0, 1, 2]
    assert items.waited_s > 0.04


def test_leaving_early_ends_the_thread() -> None:
    made: list[int] = []

    def endless() -> Iterator[torch.Tensor]:
        while True:
            made.append(1)
            yield torch.zeros(1)

    with Prefetch(endless(), 2) as items:
        next(iter(items))
    count = len(made)
    time.sleep(0.05)
    assert len(made) == count


def test_batches_are_prepared_ahead(rows: RowStore) -> None:
    ready: list[Batch] = []

    def noting() -> Iterator[Batch]:
        for batch in Loader(rows, np.arange(len(rows)), 0, StepShape(8)).batches(0, 8):
            ready.append(batch)
            yield batch

    with Prefetch(noting(), 3) as items:
        next(iter(items))
        deadline = time.monotonic() + 5
        while len(ready) < 4 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(ready) >= 4
