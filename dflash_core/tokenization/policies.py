"""What the recipe says about rows: the cut at max_length, truncated thoughts, too few supervised tokens.

Applied to whole columns. A policy never makes a row vanish: the row stays in the batch with the reason in `dropped`,
so that statistics and gate count it.
"""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from dflash_core.quality.flags import Flag
from dflash_core.quality.repetition import repetition_loops
from dflash_core.recipe import Recipe
from dflash_core.tokenization.rows import RowBatch


def apply_policies(batch: RowBatch, recipe: Recipe) -> RowBatch:
    """Cut rows, mark them and say which are dropped and why."""
    rules, longest = recipe.tokenization, recipe.tokenization.max_length
    flags = batch.flags | np.where(_loops(batch), int(Flag.REPETITION_LOOP), 0)
    clipped = batch.end > longest
    flags = np.where(clipped, flags | int(Flag.CLIPPED | Flag.NO_TERMINATOR), flags)
    end = np.minimum(batch.end, longest)
    start = np.minimum(batch.start, end)
    supervised = end - start
    dropped = np.full(len(batch), None, object)
    # The reason that explains most comes last and wins.
    dropped[supervised < recipe.min_supervised_tokens] = "too few supervised tokens"
    dropped[supervised == 0] = "no supervised token"
    if rules.truncated_thinking == "reject":
        dropped[(flags & int(Flag.TRUNCATED_IN_THOUGHT)) != 0] = "truncated in the thought"
    if rules.truncation == "drop":
        dropped[clipped] = "longer than max_length"
    ids, offsets = _clip(batch, longest)
    return replace(batch, flags=flags, ids=ids, offsets=offsets, start=start, end=end, dropped=dropped.tolist())


def _loops(batch: RowBatch) -> NDArray[np.bool_]:
    begins = batch.offsets[:-1]
    terminated = (batch.flags & int(Flag.NO_TERMINATOR)) == 0
    ids = batch.ids.view(np.uint32)
    return repetition_loops(ids, begins + batch.start, begins + batch.end - terminated)


def _clip(batch: RowBatch, longest: int) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    lengths = np.diff(batch.offsets)
    if not len(lengths) or lengths.max() <= longest:
        return batch.ids, batch.offsets
    kept = np.minimum(lengths, longest)
    within = np.arange(len(batch.ids)) - np.repeat(batch.offsets[:-1], lengths)
    return batch.ids[within < np.repeat(kept, lengths)], np.concatenate([[0], np.cumsum(kept)])
