"""Quantiles are exact, and a spike is found and named where there is one."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_core.statistics.histogram import equal_bins, histogram, quantiles, spike_window


@given(st.lists(st.integers(0, 50), min_size=1))
def test_quantiles_are_exact(values: list[int]) -> None:
    array = np.array(values)
    found = quantiles(histogram(array))
    for name, share in (("p10", 0.1), ("median", 0.5), ("p99", 0.99)):
        assert found[name] == np.quantile(array, share, method="inverted_cdf")
    assert (found["min"], found["max"]) == (min(values), max(values))


@pytest.mark.parametrize("deviation", [6, 40, 700])
@pytest.mark.parametrize("rows", [250, 500, 100_000])
def test_healthy_answers_have_no_spike(deviation: int, rows: int) -> None:
    for seed in range(20):
        values = np.random.default_rng(seed).normal(4 * deviation, deviation, rows).clip(1)
        assert spike_window(histogram(values.astype(np.int64))) is None


def test_a_small_spike_next_to_a_narrow_mode_is_found() -> None:
    values = np.random.default_rng(0).normal(90, 9, 1782).astype(np.int64)
    assert spike_window(histogram(np.concatenate([values, np.full(218, 6)]))) == (6, 6, 218)


def test_a_spike_within_the_bulk_is_named_exactly() -> None:
    values = np.random.default_rng(0).normal(90, 20, 800).astype(np.int64)
    found = spike_window(histogram(np.concatenate([values, np.full(400, 85)])))
    assert found == (85, 85, 400 + int((values == 85).sum()))


def test_a_spike_may_be_a_few_values_wide() -> None:
    values = np.concatenate([np.arange(100, 900, 4), 5 + np.arange(90) % 3])
    assert spike_window(histogram(values)) == (5, 7, 90)


def test_bins_hold_every_row() -> None:
    counts = {3: 5, 6: 90, 7: 2, 900: 1, 1_000_000: 1}
    bins = equal_bins(counts, 48, (6, 7))
    assert (bins.inside.sum(), bins.outside.sum()) == (92, 7)
    assert bins.inside[bins.edges[:-1].searchsorted(6, side="right") - 1] > 0
    assert bins.highest == 1_000_000
