"""Shards: the rows of one source file as an Arrow IPC file with zstd, its bytes a function of its rows alone.

The mask is stored as spans, which costs almost nothing beside the ids.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dflash_core.tokenization.rows import RowBatch

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
"""One row a turn. Spans are [start, end) in tokens; `prompt_tokens` lie before the first supervised token,
`completion_tokens` are supervised."""


def write_shard(batches: Sequence[RowBatch], metadata: Mapping[str, str]) -> bytes:
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
        pyarrow.ArrowInvalid: the bytes are no shard.
    """
    return pa.ipc.open_file(pa.BufferReader(body)).read_all()


def _record_batch(batch: RowBatch, schema: pa.Schema) -> pa.RecordBatch:
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
        pa.ListArray.from_arrays(pa.array(_boundaries(lengths)), pa.array(ids)),
        pa.ListArray.from_arrays(pa.array(np.arange(len(index) + 1, dtype=np.int32)), span),
        pa.DictionaryArray.from_arrays(pa.array(reasons), pa.array(FINISH_REASONS, pa.string())),
        pa.array(start),
        pa.array(end - start),
        pa.array(batch.flags[kept]),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _boundaries(lengths: NDArray[np.int64]) -> NDArray[np.int32]:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
