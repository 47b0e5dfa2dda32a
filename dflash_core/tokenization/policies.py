"""What the recipe says about rows: the cut at max_length, truncated thoughts, too few supervised tokens.

Applied to whole columns. A policy never makes a row vanish: the row stays in the batch with the reason in `dropped`,
so that statistics and gate count it.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from dflash_core.completions.repetition import repetition_loops
from dflash_core.quality.flags import Flag
from dflash_core.quality.hashes import hash_rows
from dflash_core.recipe import Recipe
from dflash_core.tokenization.rows import I64, RowBatch


def apply_policies(batch: RowBatch, recipe: Recipe) -> RowBatch:
    """Cut the spans of rows whose ids `batch_of` has cut, mark them and say which are dropped and why."""
    rules, longest = recipe.tokenization, recipe.tokenization.max_length
    clipped = batch.end > longest
    flags = np.where(clipped, batch.flags | int(Flag.CLIPPED | Flag.NO_TERMINATOR), batch.flags)
    end = np.minimum(batch.end, longest)
    start = np.minimum(batch.start, end)
    flags |= np.where(_loops(batch, flags, start, end), int(Flag.REPETITION_LOOP), 0)
    supervised = end - start
    dropped = np.full(len(batch), None, object)
    # The reason that explains most comes last and wins.
    dropped[supervised < recipe.min_supervised_tokens] = "too few supervised tokens"
    dropped[supervised == 0] = "no supervised token"
    if rules.truncated_thinking == "reject":
        dropped[(flags & int(Flag.TRUNCATED_IN_THOUGHT)) != 0] = "truncated in the thought"
    if rules.truncation == "drop":
        dropped[clipped] = "longer than max_length"
    return replace(batch, flags=flags, start=start, end=end, dropped=dropped.tolist())


def drop_repeats(batches: Sequence[RowBatch]) -> list[RowBatch]:
    """Drop the rows of a file whose ids are those of an earlier row of it."""
    seen: set[int] = set()
    done = []
    for batch in batches:
        hashes = hash_rows(batch.ids.view(np.uint32), batch.offsets).tolist()
        dropped = list(batch.dropped)
        for i, text in enumerate(hashes):
            if text in seen and dropped[i] is None:
                dropped[i] = "repeats an earlier row"
            seen.add(text)
        done.append(replace(batch, dropped=dropped))
    return done


def _loops(batch: RowBatch, flags: I64, start: I64, end: I64) -> NDArray[np.bool_]:
    begins = batch.offsets[:-1]
    terminated = (flags & int(Flag.NO_TERMINATOR)) == 0
    return repetition_loops(batch.ids.view(np.uint32), begins + start, begins + end - terminated)
