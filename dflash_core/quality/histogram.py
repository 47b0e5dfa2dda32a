"""Exact sparse histograms of small integers: they add up over files, and quantiles of the sum are exact."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Histogram = dict[int, int]
"""Value -> number of rows; only values that occur, ascending."""

QUANTILES = {"min": 0.0, "p01": 0.01, "p10": 0.1, "p25": 0.25, "median": 0.5, "p75": 0.75, "p90": 0.9, "p99": 0.99}


def histogram(values: NDArray[np.int64]) -> Histogram:
    """Count every value."""
    found, counts = np.unique(values, return_counts=True)
    return dict(zip(found.tolist(), counts.tolist(), strict=True))


def merge_histograms(histograms: Iterable[Mapping[int, int]]) -> Histogram:
    """Add them up."""
    total: Counter[int] = Counter()
    for one in histograms:
        total.update(one)
    return dict(sorted(total.items()))


def quantiles(counts: Mapping[int, int]) -> dict[str, int]:
    """`QUANTILES`, max and the mean rounded down; empty without rows.

    A quantile is the smallest value that at least this share of the rows does not exceed (numpy's "inverted_cdf").
    """
    total = sum(counts.values())
    if not total:
        return {}
    values, below = np.array(list(counts)), np.cumsum(list(counts.values()))
    places = np.searchsorted(below, [max(1, int(np.ceil(share * total))) for share in QUANTILES.values()])
    found = dict(zip(QUANTILES, values[places].tolist(), strict=True))
    return found | {"max": int(values[-1]), "mean": sum(v * n for v, n in counts.items()) // total}


def at_most(counts: Mapping[int, int], limit: int) -> int:
    """Rows whose value is at most `limit`."""
    return sum(rows for value, rows in counts.items() if value <= limit)


@dataclass(frozen=True)
class Bins:
    """A histogram in bins of equal width, for drawing; what lies beyond the last edge is in the last bin."""

    edges: NDArray[np.int64]
    """One more than bins, from 0."""
    inside: NDArray[np.int64]
    """Rows a bin whose value lies in the window that was asked for."""
    outside: NDArray[np.int64]
    """All other rows a bin."""
    highest: int
    """The largest value there is."""


def equal_bins(counts: Histogram, bins: int, window: tuple[int, int] | None) -> Bins:
    """Bins up to where the tail gets thin; `window` (low, high) names values that are counted apart. Needs a row."""
    values, rows = np.array(list(counts)), np.array(list(counts.values()))
    p90, p995 = values[np.searchsorted(np.cumsum(rows), np.array([0.9, 0.995]) * rows.sum())]
    reach = max(bins, min(3 * p90, p995))
    step = max(1, -(-int(reach + 1) // bins))
    edges = np.arange(0, reach + step + 1, step)
    places = np.minimum(values // step, len(edges) - 2)
    low, high = window or (0, -1)
    within = (values >= low) & (values <= high)
    inside, outside = (
        np.bincount(places[where], rows[where], minlength=len(edges) - 1).astype(np.int64)
        for where in (within, ~within)
    )
    return Bins(edges, inside, outside, int(values[-1]))
