"""A shard holds exactly the kept rows, and its bytes are a function of them."""

import numpy as np

from dflash_core.tokenization.rows import Row, RowBatch, batch_of
from dflash_core.tokenization.shards import SCHEMA, read_shard, write_shard


def batch(first: int, rows: int, dropped: int | None = None) -> RowBatch:
    made = batch_of(
        [
            Row(f"r{i}", i + 1, None if i % 2 else "length", i, np.arange(i + 3, dtype=np.int32), 1, i + 2)
            for i in range(first, first + rows)
        ],
        4096,
    )
    if dropped is not None:
        made.dropped[dropped] = "too short"
    return made


def test_rows_come_back_as_they_were_written() -> None:
    body = write_shard([batch(0, 4, dropped=2), batch(4, 2)], {"b": "2", "a": "1"})
    table = read_shard(body)
    assert table.schema.equals(SCHEMA)
    assert table.schema.metadata == {b"a": b"1", b"b": b"2"}
    rows = table.to_pylist()
    assert [row["row_id"] for row in rows] == ["r0", "r1", "r3", "r4", "r5"]
    assert rows[2] == {
        "row_id": "r3",
        "source_line": 4,
        "input_ids": [0, 1, 2, 3, 4, 5],
        "loss_spans": [{"start": 1, "end": 5}],
        "finish_reason": "unknown",
        "prompt_tokens": 1,
        "completion_tokens": 4,
        "flags": 3,
    }


def test_equal_rows_give_equal_bytes() -> None:
    first, second = ([batch(0, 50), batch(50, 9)] for _ in range(2))
    assert write_shard(first, {"a": "1", "b": "2"}) == write_shard(second, {"b": "2", "a": "1"})


def test_a_batch_of_which_nothing_is_kept_leaves_no_row() -> None:
    table = read_shard(write_shard([batch(0, 1, dropped=0), batch(1, 1)], {}))
    assert table.column("row_id").to_pylist() == ["r1"]
