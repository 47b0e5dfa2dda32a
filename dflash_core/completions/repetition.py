"""Completions that end in a loop: the same few tokens over and over, usually until the engine's token limit.

Only the end of a row is looked at, so the cost is about 2 us a row; a loop that the model left again is not found.
"""

import numpy as np
from numpy.typing import NDArray

MAX_PERIOD = 64
MIN_TOKENS = 96
MIN_REPEATS = 4


def repetition_loops(ids: NDArray[np.uint32], starts: NDArray[np.int64], ends: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which rows end in a loop of at most `MAX_PERIOD` tokens, `MIN_REPEATS` or more times over `MIN_TOKENS` or more.

    Args:
        ids: all rows' ids, one after the other.
        starts: where each row's completion starts in `ids`.
        ends: where it ends, its terminator left out.
    """
    loops = np.zeros(len(starts), bool)
    long_enough = np.flatnonzero(ends - starts >= MIN_TOKENS)
    if not long_enough.size:
        return loops
    last = ids[ends[long_enough, None] + np.arange(-MAX_PERIOD - 2, 0)]
    alike = (last[:, 1:-1] == last[:, -1:]) & (last[:, :-2] == last[:, -2:-1])  # the last two tokens, a period before
    rows, columns = np.nonzero(alike)
    for row, period in zip(long_enough[rows].tolist(), (MAX_PERIOD - columns).tolist(), strict=True):
        tail = ids[starts[row] : ends[row]][-max(MIN_TOKENS, MIN_REPEATS * period) :]
        loops[row] |= len(tail) >= MIN_REPEATS * period and bool((tail[period:] == tail[:-period]).all())
    return loops
