"""A completion that ends in a loop is flagged; text that merely repeats itself here and there is not."""

import numpy as np
import pytest

from dflash_core.completions.repetition import MIN_REPEATS, MIN_TOKENS, repetition_loops


def _flagged(*completions: list[int]) -> list[bool]:
    flat = np.array([token for completion in completions for token in completion], np.uint32)
    bounds = np.cumsum([0, *map(len, completions)])
    return repetition_loops(flat, bounds[:-1], bounds[1:]).tolist()


TEXT = np.random.default_rng(0).integers(0, 5000, 400).tolist()


@pytest.mark.parametrize("period", [1, 2, 7, 24, 64])
def test_a_loop_at_the_end_is_found_between_innocent_rows(period: int) -> None:
    repeats = max(MIN_REPEATS, -(-MIN_TOKENS // period)) + 1
    loop = list(range(period)) * repeats
    assert _flagged(TEXT, TEXT[:50] + loop, loop, TEXT) == [False, True, True, False]


def test_a_loop_cut_within_its_period_is_found() -> None:
    assert _flagged(TEXT + [1, 2, 3, 4, 5] * 30 + [1, 2]) == [True]


def test_short_repeats_and_loops_that_ended_are_none() -> None:
    assert _flagged(TEXT + [9] * (MIN_TOKENS - 1), [9] * 200 + TEXT, [9] * (MIN_TOKENS - 1), []) == [False] * 4


def test_three_paragraph_long_repeats_are_none() -> None:
    assert _flagged(TEXT + list(range(60)) * (MIN_REPEATS - 1)) == [False]
