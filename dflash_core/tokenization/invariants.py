"""What must hold of every row of a shard, seen from the stored bytes alone: no tokenizer, milliseconds a shard."""

from collections import Counter

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dflash_core.quality.flags import Flag


def broken_invariants(table: pa.Table) -> dict[str, int]:
    """Rows that break the promises on loss masks, by promise; empty: all hold.

    Ids and mask are of equal length because the mask is stored as spans: they must lie within the row, in order, and
    hold something. A row that the engine ended by itself must end in the turn's terminator, the same in every such row.
    """
    ids, spans = table.column("input_ids").combine_chunks(), table.column("loss_spans").combine_chunks()
    lengths, counts = ids.value_lengths().to_numpy(), spans.value_lengths().to_numpy()
    pairs = spans.flatten()
    start, end = (pairs.field(name).to_numpy(zero_copy_only=False).astype(np.int64) for name in ("start", "end"))
    row = np.repeat(np.arange(len(table)), counts)
    last = np.full(len(table), -1, np.int64)
    np.maximum.at(last, row, end)
    first = np.full(len(table), np.iinfo(np.int64).max)
    np.minimum.at(first, row, start)
    supervised = np.bincount(row, weights=end - start, minlength=len(table)).astype(np.int64)
    overlapping = np.zeros(len(table), bool)
    overlapping[row[1:][(row[1:] == row[:-1]) & (start[1:] < end[:-1])]] = True
    outside = np.zeros(len(table), bool)
    outside[row[(start < 0) | (end > lengths[row]) | (start >= end)]] = True
    broken = {
        "no supervised token": supervised < 1,
        "a span outside its row": outside,
        "spans that overlap": overlapping,
        "prompt_tokens is not where supervision begins": first != table.column("prompt_tokens").to_numpy(),
        "completion_tokens is not what is supervised": supervised != table.column("completion_tokens").to_numpy(),
    }
    whole = ~(outside | (supervised < 1))
    broken["a stop without the terminator"] = _without_terminator(table, np.where(whole, last, 0))
    return {what: int(rows.sum()) for what, rows in broken.items() if rows.any()}


def _without_terminator(table: pa.Table, ends: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Rows that stopped by themselves, uncut, and do not end in the id that most of them end in."""
    ids = table.column("input_ids").combine_chunks()
    flat, offsets = ids.flatten().to_numpy(), np.concatenate([[0], np.cumsum(ids.value_lengths().to_numpy())])
    flags: NDArray[np.int64] = table.column("flags").to_numpy()
    stopped = np.asarray(table.column("finish_reason").to_pylist()) == "stop"
    checked: NDArray[np.bool_] = stopped & ((flags & int(Flag.CLIPPED)) == 0) & (ends > 0)
    if not checked.any():
        return checked
    tokens: NDArray[np.int32] = flat[np.maximum(offsets[:-1] + ends - 1, 0)]
    (terminator, _), *_ = Counter(tokens[checked].tolist()).most_common(1)
    wrong: NDArray[np.bool_] = (tokens != terminator) | ((flags & int(Flag.NO_TERMINATOR)) != 0)
    return checked & wrong
