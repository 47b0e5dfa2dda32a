"""The n-gram drafter continues with the most frequent continuation of the longest context it has seen."""

from collections import Counter, defaultdict

import numpy as np
import pytest

from dflash_core.decoding.drafts import NgramModel


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_predictions_are_the_counted_ones(n: int) -> None:
    generator = np.random.default_rng(n)
    rows = [generator.integers(0, 6, int(generator.integers(1, 40))).astype(np.int32) for _ in range(30)]
    counts: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
    for row in rows:
        for end in range(len(row)):
            for length in range(min(n - 1, end) + 1):
                counts[tuple(row[end - length : end].tolist())][int(row[end])] += 1
    model = NgramModel(n, rows)
    for _ in range(200):
        context = generator.integers(0, 7, int(generator.integers(0, 6))).tolist()
        known = next(
            tail
            for length in range(min(n - 1, len(context)), -1, -1)
            if (tail := tuple(context[len(context) - length :])) in counts
        )
        best = max(counts[known].items(), key=lambda item: (item[1], -item[0]))[0]
        assert model.predict(context) == best


def test_a_continuation_feeds_on_itself() -> None:
    model = NgramModel(3, [np.arange(10, dtype=np.int32)])
    assert model.continuation([4, 5], 3) == [6, 7, 8]
    assert model.continuation([99, 5], 3) == [6, 7, 8]


def test_nothing_to_count_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one row"):
        NgramModel(3, [np.zeros(0, np.int32)])
