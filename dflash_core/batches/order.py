"""Which rows training never sees, and the order of the others in an epoch: pure functions, so nothing is kept.

Held out is decided by (seed, conversation), the order by (seed, epoch, row ids, lengths, rows per step).

The trade-off: rows of a step have similar lengths, so that little of a padded batch is padding, but any row can meet
only the rows of its window (thousands of rows drawn at random), not of the whole epoch. The rows of a step do not
depend on how many ranks and micro-batches share them: 1, 2 and N ranks see the same steps.
"""

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.int64]

WINDOW_ROWS = 4096
"""Rows that are sorted by length among themselves, at least; padded waste falls with it, randomness grows less."""
WINDOW_STEPS = 16


def epoch_steps(rows: int, step_rows: int) -> int:
    """Optimizer steps in an epoch; the last one may be smaller."""
    return -(-rows // step_rows)


def epoch_order(
    row_ids: Sequence[str], lengths: npt.NDArray[np.int32], seed: int, epoch: int, step_rows: int
) -> list[Rows]:
    """Row indices of each optimizer step of the epoch, every row exactly once.

    Args:
        row_ids: [R] names; the order depends on them, not on the positions of the rows in the shards.
        lengths: [R] tokens.
        step_rows: rows of one optimizer step over all ranks and micro-batches.

    Returns:
        `epoch_steps(R, step_rows)` arrays, each sorted by length; only one of them is smaller than `step_rows`.
    """
    keys = np.fromiter((uniform_bits("order", seed, epoch, r) for r in row_ids), dtype=np.uint64, count=len(row_ids))
    shuffled = np.argsort(keys, kind="stable")
    window = max(WINDOW_STEPS, -(-WINDOW_ROWS // step_rows)) * step_rows
    steps: list[Rows] = []
    for start in range(0, len(shuffled), window):
        rows = shuffled[start : start + window]
        rows = rows[np.lexsort((keys[rows], lengths[rows]))]
        groups = [rows[i : i + step_rows] for i in range(0, len(rows), step_rows)]
        steps.extend(sorted(groups, key=lambda group: keys[group[0]]))
    return steps


def micro_batch(step: Rows, index: int, batch_rows: int) -> Rows:
    """Micro-batch `index` of a step; past the end it is empty. Rank r of R takes r, r + R, r + 2R, ..."""
    return step[index * batch_rows : (index + 1) * batch_rows]


def is_held_out(seed: int, conversation: str, share: float) -> bool:
    """Whether its rows belong to the held-out `share`: stable under any other change to the data.

    A conversation is held out whole: a later turn has the earlier ones, answers included, in its prompt.
    """
    return uniform("held out", seed, conversation) < share


def uniform(*parts: str | int) -> float:
    """A number in [0, 1) that depends on `parts` and nothing else (blake2b of their length-prefixed text)."""
    return uniform_bits(*parts) / 2**64


def uniform_bits(*parts: str | int) -> int:
    """The 64 bits behind `uniform`."""
    text = "".join(f"{len(part)}:{part}" for part in map(str, parts))
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")
