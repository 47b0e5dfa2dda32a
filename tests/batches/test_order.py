"""The order of rows: complete, independent of workers, and tight; and which of them are held out."""

import numpy as np
import pytest

from dflash_core.batches.order import WINDOW_ROWS, epoch_order, epoch_steps, is_held_out

ROWS = [f"row{i}" for i in range(12_501)]


def lengths(count: int) -> np.ndarray:
    """A realistic spread: log-normal, 60 to 4,096 tokens."""
    drawn = np.random.default_rng(0).lognormal(7.2, 0.7, count)
    return np.clip(drawn, 60, 4096).astype(np.int32)


def names(count: int) -> list[str]:
    return [f"file{i % 7}:{i}" for i in range(count)]


@pytest.mark.parametrize(("rows", "step_rows"), [(1, 8), (8, 8), (1_001, 16), (WINDOW_ROWS + 13, 32)])
def test_every_row_comes_once_an_epoch_and_one_step_at_most_is_short(rows: int, step_rows: int) -> None:
    steps = epoch_order(names(rows), lengths(rows), 3, 0, step_rows)
    assert sorted(np.concatenate(steps)) == list(range(rows))
    assert len(steps) == epoch_steps(rows, step_rows)
    assert sum(len(step) != step_rows for step in steps) <= 1


def test_the_order_follows_row_ids_not_their_places() -> None:
    ids, size = names(500), lengths(500)
    turned = np.random.default_rng(1).permutation(500)
    plain = [[ids[i] for i in step] for step in epoch_order(ids, size, 0, 1, 8)]
    moved_ids = [ids[i] for i in turned]
    moved = [[moved_ids[i] for i in step] for step in epoch_order(moved_ids, size[turned], 0, 1, 8)]
    assert plain == moved


def test_epochs_and_seeds_differ() -> None:
    orders = {
        tuple(np.concatenate(epoch_order(names(300), lengths(300), seed, epoch, 8)))
        for seed in (0, 1)
        for epoch in (0, 1)
    }
    assert len(orders) == 4


def test_little_of_a_padded_batch_is_padding() -> None:
    size = lengths(20_000)
    for batch_rows, step_rows in ((8, 8), (8, 64), (4, 256)):
        padded = tokens = 0
        for step in epoch_order(names(20_000), size, 0, 0, step_rows):
            for start in range(0, len(step), batch_rows):
                part = size[step[start : start + batch_rows]]
                padded += len(part) * int(part.max())
                tokens += int(part.sum())
        assert 1 - tokens / padded < 0.10


def test_the_split_is_stable_and_of_the_asked_size() -> None:
    held_out = {r for r in ROWS if is_held_out(0, r, 0.2)}
    assert held_out == {r for r in reversed(ROWS) if is_held_out(0, r, 0.2)}
    assert abs(len(held_out) / len(ROWS) - 0.2) < 0.015


def test_more_rows_and_a_larger_share_move_no_row_back_into_training() -> None:
    small = {r for r in ROWS[:100] if is_held_out(0, r, 0.1)}
    assert small <= {r for r in ROWS if is_held_out(0, r, 0.1)}
    assert small <= {r for r in ROWS if is_held_out(0, r, 0.3)}


def test_another_seed_holds_out_other_rows_and_the_ends_are_exact() -> None:
    assert {r for r in ROWS if is_held_out(0, r, 0.1)} != {r for r in ROWS if is_held_out(1, r, 0.1)}
    assert not any(is_held_out(0, r, 0.0) for r in ROWS)
    assert all(is_held_out(0, r, 1.0) for r in ROWS)
