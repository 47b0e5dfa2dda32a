"""Shards: the rows of one source file as an Arrow IPC file with zstd, its bytes a function of its rows alone.

The mask is stored as spans, which costs almost nothing compared with the ids.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dflash_core.tokenization.encode import RowColumns
from dflash_core.tokenization.flags import Flag

FINISH_REASONS = ("stop", "length", "tool_calls", "unknown")
SPAN = pa.struct([pa.field("start", pa.int32(), nullable=False), pa.field("end", pa.int32(), nullable=False)])
SCHEMA = pa.schema(
    [
        pa.field("row_id", pa.string(), nullable=False),
        pa.field("source_line", pa.int64(), nullable=False),
        pa.field("input_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("loss_spans", pa.list_(SPAN), nullable=False),
        pa.field("finish_reason", pa.dictionary(pa.int8(), pa.string()), nullable=False),
        pa.field("prompt_tokens", pa.int32(), nullable=False),
        pa.field("completion_tokens", pa.int32(), nullable=False),
        pa.field("flags", pa.int64(), nullable=False),
    ]
)
"""One row a turn. Spans are [start, end) in tokens; `prompt_tokens` come before the first supervised token,
`completion_tokens` are supervised."""


def write_shard(batches: Sequence[RowColumns], metadata: Mapping[str, str]) -> bytes:
    """The kept rows of all batches. Equal rows and metadata give equal bytes."""
    schema = SCHEMA.with_metadata(dict(sorted(metadata.items())))
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=pa.Codec("zstd", compression_level=1), use_threads=False)
    with pa.ipc.new_file(sink, schema, options=options) as writer:
        for batch in batches:
            writer.write_batch(_record_batch(batch, schema))
    buffer = sink.getvalue()
    return buffer.to_pybytes()  # type: ignore[no-any-return]


def read_shard(body: bytes) -> pa.Table:
    """The inverse: a table of `SCHEMA` with the metadata.

    Raises:
        pyarrow.ArrowInvalid: the bytes are not a shard.
    """
    return pa.ipc.open_file(pa.BufferReader(body)).read_all()


def broken_promises(table: pa.Table) -> dict[str, int]:
    """Rows that break the promises on loss masks, by promise; empty: all hold. No tokenizer, milliseconds a shard.

    Ids and mask are of equal length because the mask is stored as spans: they must be within the row, in order, and
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


def _record_batch(batch: RowColumns, schema: pa.Schema) -> pa.RecordBatch:
    kept = np.array([reason is None for reason in batch.dropped], bool)
    ids, lengths = batch.ids, np.diff(batch.offsets)
    if not kept.all():
        ids, lengths = ids[np.repeat(kept, lengths)], lengths[kept]
    index = np.flatnonzero(kept)
    start, end = batch.start[kept].astype(np.int32), batch.end[kept].astype(np.int32)
    span = pa.StructArray.from_arrays([pa.array(start), pa.array(end)], fields=list(SPAN))
    reasons = np.array([FINISH_REASONS.index(batch.finish_reasons[i] or "unknown") for i in index], np.int8)
    columns = [
        pa.array([batch.row_ids[i] for i in index], pa.string()),
        pa.array(batch.lines[kept]),
        pa.ListArray.from_arrays(pa.array(np.cumsum([0, *lengths], dtype=np.int32)), pa.array(ids)),
        pa.ListArray.from_arrays(pa.array(np.arange(len(index) + 1, dtype=np.int32)), span),
        pa.DictionaryArray.from_arrays(pa.array(reasons), pa.array(FINISH_REASONS, pa.string())),
        pa.array(start),
        pa.array(end - start),
        pa.array(batch.flags[kept]),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)
