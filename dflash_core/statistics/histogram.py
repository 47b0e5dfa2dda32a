"""Exact sparse histograms of small integers: they add up over files, and quantiles of the sum are exact.

Also finds the one place in a histogram that holds an implausible share of the rows. Lengths of real answers spread
smoothly, so a spike is a value, or a few neighbouring ones, with several times the rows of their surroundings; a plain
"largest bin" would name the mode of healthy data.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Histogram = dict[int, int]
"""Value -> number of rows; only values that occur, ascending."""

QUANTILES = {"min": 0.0, "p01": 0.01, "p10": 0.1, "p25": 0.25, "median": 0.5, "p75": 0.75, "p90": 0.9, "p99": 0.99}

SPIKE_WIDTH = 5
"""Neighbouring values that a spike may cover."""
CONTRAST = 4.0
"""Times the rows of the fullest place nearby."""
MIN_SHARE = 0.02
MIN_ROWS = 20
CERTAIN_SHARE = 0.4
"""No surroundings make this share in so narrow a place plausible."""
CORE = 0.8
"""Of a spike's rows: it is named by the narrowest range that holds as many."""


def histogram(values: NDArray[np.int64]) -> Histogram:
    """Count every value."""
    found, counts = np.unique(values, return_counts=True)
    return dict(zip(found.tolist(), counts.tolist(), strict=True))


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
    """A histogram in bins of equal width, for drawing; what is beyond the last edge is in the last bin."""

    edges: NDArray[np.int64]
    """One more than bins, from 0."""
    inside: NDArray[np.int64]
    """Rows a bin whose value is in the window that was asked for."""
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


def spike_window(counts: Mapping[int, int]) -> tuple[int, int, int] | None:
    """The spike with the most rows as (lowest value, highest value, rows), or None.

    Windows of 1 and of `SPIKE_WIDTH` values slide over the dense histogram. The fuller one that stands out wins, and
    then is narrowed to the few values that hold most of its rows: "6 tokens", not "4 to 8".

    Args:
        counts: value -> rows, values not negative.
    """
    total = sum(counts.values())
    if total < MIN_ROWS:
        return None
    # Room on both sides, so that windows and their surroundings exist at the ends, too.
    pad = 2 * SPIKE_WIDTH
    rows = np.zeros(max(counts) + 1 + 2 * pad, np.int64)
    rows[np.array(list(counts)) + pad] = list(counts.values())
    found = [_fullest_window(rows, width, total) for width in (1, SPIKE_WIDTH)]
    best = max((window for window in found if window), key=lambda window: window[1], default=None)
    if best is None:
        return None
    start, whole, width = best
    places = ((start + shift, size) for size in range(1, width + 1) for shift in range(width - size + 1))
    first, size = next((a, n) for a, n in places if rows[a : a + n].sum() >= CORE * whole)
    return first - pad, first - pad + size - 1, int(rows[first : first + size].sum())


def _fullest_window(rows: NDArray[np.int64], width: int, total: int) -> tuple[int, int, int] | None:
    """(index, rows, width) of the fullest window of this width that is a spike."""
    below = np.concatenate([[0], np.cumsum(rows)])
    window = below[width:] - below[:-width]
    # A window is compared with windows of the same width that do not overlap it, up to SPIKE_WIDTH values away.
    inner = slice(SPIKE_WIDTH, len(window) - SPIKE_WIDTH)
    shifts = [shift for shift in range(-SPIKE_WIDTH, SPIKE_WIDTH + 1) if abs(shift) >= width]
    around = np.max([window[inner.start + shift : inner.stop + shift] for shift in shifts], axis=0)
    here = window[inner]
    stands_out = (here >= CONTRAST * around) & (here >= max(MIN_ROWS, MIN_SHARE * total))
    rows_there = np.where(stands_out | (here >= CERTAIN_SHARE * total), here, 0)
    best = int(rows_there.argmax())
    return (best + inner.start, int(rows_there[best]), width) if rows_there[best] else None
