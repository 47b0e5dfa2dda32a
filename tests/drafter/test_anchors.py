"""Anchors are eligible, sorted, without repetition, and a function of (seed, epoch, row id) and the mask alone."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_core.drafter.anchors import DocumentAnchors, draw_anchors, eligible_anchors, stack_blocks

masks = st.lists(st.booleans(), min_size=1, max_size=80).map(lambda m: np.array(m, np.bool_))


@given(masks, st.integers(1, 40), st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_drawn_anchors_are_sorted_distinct_and_eligible(mask: np.ndarray, n: int, epoch: int) -> None:
    drawn = draw_anchors(mask, n, seed=0, epoch=epoch, row_id="r").tolist()
    eligible = [a for a in range(len(mask) - 1) if mask[a] and mask[a + 1]]
    assert drawn == sorted(set(drawn))
    assert set(drawn) <= set(eligible)
    assert len(drawn) == min(n, len(eligible))


def test_an_anchor_needs_itself_and_the_next_token_supervised() -> None:
    mask = np.array([0, 1, 1, 0, 1, 0, 1, 1, 1], np.bool_)
    assert eligible_anchors(mask).tolist() == [1, 6, 7]


def test_the_draw_does_not_depend_on_the_platform_or_library_version() -> None:
    drawn = draw_anchors(np.ones(1000, np.bool_), 6, seed=3, epoch=1, row_id="file#17")
    assert drawn.tolist() == [86, 198, 430, 541, 796, 955]


@pytest.mark.parametrize("other", [{"seed": 1}, {"epoch": 1}, {"row_id": "s"}])
def test_seed_epoch_and_row_each_change_the_draw(other: dict[str, object]) -> None:
    same = {"seed": 0, "epoch": 0, "row_id": "r"}
    mask = np.ones(500, np.bool_)
    first, again, changed = (
        draw_anchors(mask, 20, **options)  # type: ignore[arg-type]
        for options in (same, same, same | other)
    )
    assert first.tolist() == again.tolist()
    assert first.tolist() != changed.tolist()


def test_every_eligible_token_is_drawn_about_equally_often() -> None:
    mask = np.ones(41, np.bool_)
    counts = np.zeros(41)
    for epoch in range(800):
        counts[draw_anchors(mask, 10, seed=0, epoch=epoch, row_id="r")] += 1
    # 40 eligible tokens, each with probability 1/4: 200 expected, standard deviation 12.
    assert counts[40] == 0
    assert abs(counts[:40] - 200).max() < 60


def test_packing_moves_anchors_with_their_documents() -> None:
    first, second = np.array([2, 5]), np.array([1])
    packed = stack_blocks([[DocumentAnchors(0, 10, first), DocumentAnchors(10, 16, second)]])
    assert packed.anchor.tolist() == [[2, 5, 11]]
    assert packed.start.tolist() == [[0, 0, 10]]
    assert packed.end.tolist() == [[10, 10, 16]]
    assert packed.valid.all()


def test_rows_with_fewer_anchors_are_filled_with_padding_blocks_at_the_end() -> None:
    blocks = stack_blocks([[DocumentAnchors(0, 9, np.array([3]))], [DocumentAnchors(0, 9, np.array([1, 2, 4]))], []])
    assert blocks.valid.tolist() == [[True, False, False], [True, True, True], [False, False, False]]
    assert stack_blocks([[]]).valid.tolist() == [[False]]
    wide = stack_blocks([[DocumentAnchors(0, 9, np.array([1, 2, 4]))], []], least=5)
    assert wide.valid.tolist() == [[True, True, True, False, False], [False] * 5]
    assert wide.anchor[0, :3].tolist() == [1, 2, 4]
