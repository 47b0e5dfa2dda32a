"""Find the one place in a histogram that holds an implausible share of the rows.

Lengths of real answers spread smoothly, so a spike is a value, or a few neighbouring ones, with several times the rows
of their surroundings; a plain "largest bin" would name the mode of healthy data.
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

MAX_WIDTH = 5
CONTRAST = 4.0
"""Times the rows of the fullest place nearby."""
MIN_SHARE = 0.02
MIN_ROWS = 20
CERTAIN_SHARE = 0.4
"""No surroundings make this share in so narrow a place plausible."""
CORE = 0.8
"""Of a spike's rows: it is named by the narrowest range that holds as many."""


def spike_window(counts: Mapping[int, int]) -> tuple[int, int, int] | None:
    """The spike with the most rows as (lowest value, highest value, rows), or None.

    Args:
        counts: value -> rows, values not negative.
    """
    total = sum(counts.values())
    if total < MIN_ROWS:
        return None
    pad = 2 * MAX_WIDTH
    rows = np.zeros(max(counts) + 1 + 2 * pad, np.int64)
    rows[np.array(list(counts)) + pad] = list(counts.values())
    found = [_best(rows, width, total) for width in (1, MAX_WIDTH)]
    best = max((window for window in found if window), key=lambda window: window[1], default=None)
    if best is None:
        return None
    start, whole, width = best
    places = ((start + shift, size) for size in range(1, width + 1) for shift in range(width - size + 1))
    first, size = next((a, n) for a, n in places if rows[a : a + n].sum() >= CORE * whole)
    return first - pad, first - pad + size - 1, int(rows[first : first + size].sum())


def _best(rows: NDArray[np.int64], width: int, total: int) -> tuple[int, int, int] | None:
    """(index, rows, width) of the fullest window of this width that is a spike."""
    below = np.concatenate([[0], np.cumsum(rows)])
    window = below[width:] - below[:-width]
    inner = slice(MAX_WIDTH, len(window) - MAX_WIDTH)
    shifts = [shift for shift in range(-MAX_WIDTH, MAX_WIDTH + 1) if abs(shift) >= width]
    around = np.max([window[inner.start + shift : inner.stop + shift] for shift in shifts], axis=0)
    here = window[inner]
    stands_out = (here >= CONTRAST * around) & (here >= max(MIN_ROWS, MIN_SHARE * total))
    rows_there = np.where(stands_out | (here >= CERTAIN_SHARE * total), here, 0)
    best = int(rows_there.argmax())
    return (best + inner.start, int(rows_there[best]), width) if rows_there[best] else None
