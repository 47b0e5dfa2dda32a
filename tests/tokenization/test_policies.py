"""The cut at max_length and what is dropped: by rule, marked, counted, with the mask cut where the ids are."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_core.quality.flags import Flag
from dflash_core.recipe import Recipe, Source, Storage, Target, Tokenization
from dflash_core.tokenization.policies import apply_policies
from dflash_core.tokenization.rows import Row, RowBatch, batch_of


def recipe(**tokenization: object) -> Recipe:
    return Recipe(
        name="x",
        source=Source(bucket="b"),
        storage=Storage(bucket="derived"),
        target=Target(path="x"),
        tokenization=Tokenization.model_validate({"min_supervised_tokens": 1, **tokenization}),
    )


def batch(*spans: tuple[int, int, int], flags: int = 0, longest: int = 4096) -> RowBatch:
    """Rows of (length, start, end) with consecutive ids, cut at `longest`."""
    rows = [
        Row(f"r{i}", i + 1, "stop", flags, np.arange(length, dtype=np.int32) + 1000 * i, start, end)
        for i, (length, start, end) in enumerate(spans)
    ]
    return batch_of(rows, longest)


@pytest.mark.parametrize("longest", range(1, 25))
def test_a_cut_at_any_length_keeps_ids_and_mask_together_and_says_what_is_lost(longest: int) -> None:
    done = apply_policies(batch((20, 5, 19), longest=longest), recipe(max_length=longest))
    kept = min(20, longest)
    assert done.ids.tolist() == list(range(kept))
    assert done.offsets.tolist() == [0, kept]
    assert (done.start[0], done.end[0]) == (min(5, longest), min(19, longest))
    assert done.dropped == ["no supervised token" if longest <= 5 else None]
    lost = longest < 19
    assert (Flag.NO_TERMINATOR in Flag(int(done.flags[0]))) == lost
    assert (Flag.CLIPPED in Flag(int(done.flags[0]))) == lost


def test_a_longer_row_is_dropped_where_the_recipe_says_so() -> None:
    done = apply_policies(batch((20, 5, 19), (8, 2, 7), longest=10), recipe(max_length=10, truncation="drop"))
    assert done.dropped == ["longer than max_length", None]


def test_losing_only_what_follows_the_terminator_is_no_loss() -> None:
    done = apply_policies(batch((20, 5, 19), longest=19), recipe(max_length=19, truncation="drop"))
    assert done.dropped == [None]
    assert not done.flags[0]
    assert len(done.ids) == 19


def test_short_rows_are_dropped_and_still_there_to_be_counted() -> None:
    done = apply_policies(batch((20, 5, 8), (20, 5, 9)), recipe(min_supervised_tokens=4))
    assert done.dropped == ["too few supervised tokens", None]
    assert len(done) == 2
    assert (done.end - done.start).tolist() == [3, 4]


def test_the_default_minimum_is_two_blocks() -> None:
    done = apply_policies(batch((99, 1, 32), (99, 1, 33)), recipe(min_supervised_tokens=None))
    assert done.dropped == ["too few supervised tokens", None]


@pytest.mark.parametrize("policy", ["keep", "reject"])
def test_thoughts_ended_by_length_follow_the_policy(policy: str) -> None:
    done = apply_policies(batch((20, 5, 19), flags=int(Flag.TRUNCATED_IN_THOUGHT)), recipe(truncated_thinking=policy))
    assert done.dropped == [None if policy == "keep" else "truncated in the thought"]


def test_loops_are_marked() -> None:
    ids = np.array([7, 8, 9] * 60 + [1], np.int32)
    row = Row("r", 1, "stop", 0, ids, 1, len(ids))
    assert Flag(int(apply_policies(batch_of([row], 4096), recipe()).flags[0])) & Flag.REPETITION_LOOP


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30), st.integers(1, 30)), max_size=6),
    st.integers(1, 40),
    st.sampled_from(["cut", "drop"]),
)
def test_policies_lose_no_row_and_keep_ids_and_spans_within_each_other(
    shapes: list[tuple[int, int, int]], longest: int, truncation: str
) -> None:
    rows = [(prompt + answer + tail, prompt, prompt + answer) for prompt, tail, answer in shapes]
    before = batch(*rows, longest=longest)
    done = apply_policies(before, recipe(max_length=longest, truncation=truncation))
    assert len(done) == len(rows)
    for i, (length, _, _) in enumerate(rows):
        ids = done.ids[done.offsets[i] : done.offsets[i + 1]]
        assert ids.tolist() == [1000 * i + j for j in range(min(length, longest))]
        assert 0 <= done.start[i] <= done.end[i] <= len(ids)
        assert done.dropped[i] is not None or done.start[i] < done.end[i]


def test_a_clip_inside_a_character_or_the_terminator_is_marked(tokenizers: Callable, tokenize_rows: Callable) -> None:
    whole = tokenize_rows(
        tokenizers("chatml"), [{"id": "r", "prompt": "q", "completion": "\U0001f9d1\u200d\U0001f680 done"}]
    )
    (length,) = whole.statistics.lengths
    for longest in range(length - 12, length):
        cut = tokenize_rows(
            tokenizers("chatml", max_length=longest),
            [{"id": "r", "prompt": "q", "completion": "\U0001f9d1\u200d\U0001f680 done"}],
        )
        assert list(cut.statistics.lengths) == [longest]
        (flags,) = cut.statistics.flag_sets
        assert bool(flags & Flag.NO_TERMINATOR) == (longest < length - 1)
