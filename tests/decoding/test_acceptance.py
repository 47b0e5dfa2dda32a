"""Acceptance from counts, and intervals that are as wide as the spread between prompts."""

import numpy as np
import pytest

from dflash_core.decoding.acceptance import (
    acceptance_interval,
    acceptance_length,
    add_histograms,
    conditional_acceptance,
    counts_of,
    difference_interval,
    length_of,
)
from dflash_core.records import LEAST_PROMPTS


def test_acceptance_from_a_histogram() -> None:
    histogram = add_histograms([(2, 1, 0, 4), (1, 0, 1, 1)])
    assert histogram == (3, 1, 1, 5)
    assert acceptance_length(histogram) == 1 + 18 / 10 == length_of(counts_of([(2, 1, 0, 4), (1, 0, 1, 1)]))
    assert conditional_acceptance(histogram) == (7 / 10, 6 / 7, 5 / 6)
    assert acceptance_length((0, 0)) == 1 == length_of(counts_of([(0, 0)]))
    assert conditional_acceptance((3, 0, 0)) == (0, 0)


def test_an_interval_holds_the_truth_about_as_often_as_it_says() -> None:
    """Prompts of unequal quality drawn 200 times: 95 % intervals of 30 prompts must cover the true mean 85 to 99 %."""
    generator = np.random.default_rng(0)
    covered = 0
    for _ in range(200):
        rates = generator.beta(4, 4, 30)
        steps = np.full(30, 40.0)
        accepted = generator.binomial(40, rates).astype(np.float64) * 4
        interval = acceptance_interval(np.stack([accepted, steps], 1))
        assert interval is not None
        covered += interval[0] <= 1 + 4 * 0.5 <= interval[1]
    assert 170 <= covered <= 198


def test_too_few_prompts_have_no_interval_rather_than_a_narrow_one() -> None:
    """One prompt is the same in every resample: no width, and any difference was beyond noise."""
    ours, theirs = np.full((LEAST_PROMPTS, 2), (30.0, 10.0)), np.full((LEAST_PROMPTS, 2), (31.0, 10.0))
    assert acceptance_interval(ours) == (4.0, 4.0)
    assert difference_interval(ours, theirs) == pytest.approx((-0.1, -0.1))
    for count in range(LEAST_PROMPTS):
        assert acceptance_interval(ours[:count]) is None
        assert difference_interval(ours[:count], theirs[:count]) is None
    silent = ours * (np.arange(LEAST_PROMPTS) > 0)[:, None]
    assert acceptance_interval(silent) is None, "a prompt without a verification step tells nothing"
    assert difference_interval(silent, silent) is None


def test_a_paired_difference_sees_what_the_spread_between_prompts_hides() -> None:
    generator = np.random.default_rng(1)
    steps = np.full(40, 50.0)
    base = generator.uniform(50, 300, 40)
    ours, theirs = np.stack([base + 10, steps], 1), np.stack([base, steps], 1)
    assert difference_interval(ours, theirs) == pytest.approx((0.2, 0.2))
    assert difference_interval(theirs, ours) == pytest.approx((-0.2, -0.2))
    wide = acceptance_interval(ours)
    assert wide is not None
    assert wide[1] - wide[0] > 0.5
    assert difference_interval(ours, ours) == (0, 0)
