"""Held-out rows."""

from dflash_core.batches.split import is_held_out

ROWS = [f"row{i}" for i in range(12_501)]


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
