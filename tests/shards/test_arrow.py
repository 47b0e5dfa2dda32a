"""A shard holds exactly the kept rows, its bytes are a function of them, and each kind of broken row is found."""

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from dflash_core.shards.arrow import SCHEMA, broken_promises, read_shard, write_shard
from dflash_core.tokenization.encode import EncodedRow, RowColumns, columns_of
from dflash_core.tokenization.flags import Flag

END = 9


def batch(first: int, rows: int, dropped: int | None = None) -> RowColumns:
    made = columns_of(
        [
            EncodedRow(f"r{i}", i + 1, None if i % 2 else "length", i, np.arange(i + 3, dtype=np.int32), 1, i + 2)
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


def table(*changes: dict[str, Any]) -> pa.Table:
    """Good rows of eight tokens, each with some columns replaced."""
    rows = []
    for number in range(6):
        row: dict[str, Any] = {
            "row_id": str(number),
            "source_line": number + 1,
            "input_ids": [1, 2, 3, 4, 5, 6, 7, END],
            "loss_spans": [{"start": 3, "end": 8}],
            "finish_reason": "stop",
            "prompt_tokens": 3,
            "completion_tokens": 5,
            "flags": 0,
        }
        rows.append({**row, **(changes[number] if number < len(changes) else {})})
    arrays = [pa.array([row[field.name] for row in rows]).cast(field.type) for field in SCHEMA]
    return pa.Table.from_arrays(arrays, schema=SCHEMA)


def spans(*pairs: tuple[int, int]) -> list[dict[str, int]]:
    return [{"start": start, "end": end} for start, end in pairs]


def test_good_rows_are_good() -> None:
    cut = {"flags": int(Flag.CLIPPED), "input_ids": list(range(1, 9))}
    by_length = {"finish_reason": "length", "flags": int(Flag.NO_TERMINATOR), "input_ids": list(range(1, 9))}
    turns = {"loss_spans": spans((3, 5), (6, 8)), "completion_tokens": 4}
    assert broken_promises(table(cut, by_length, turns)) == {}
    assert broken_promises(table().slice(0, 0)) == {}


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"loss_spans": [], "completion_tokens": 0, "prompt_tokens": 0}, "no supervised token"),
        ({"loss_spans": spans((3, 9)), "completion_tokens": 6}, "a span outside its row"),
        ({"loss_spans": spans((-1, 8)), "completion_tokens": 9, "prompt_tokens": -1}, "a span outside its row"),
        ({"loss_spans": spans((3, 6), (5, 8)), "completion_tokens": 6}, "spans that overlap"),
        ({"prompt_tokens": 2}, "prompt_tokens is not where supervision begins"),
        ({"completion_tokens": 4}, "completion_tokens is not what is supervised"),
        ({"input_ids": [1, 2, 3, 4, 5, 6, 7, 8]}, "a stop without the terminator"),
        ({"loss_spans": spans((3, 7)), "completion_tokens": 4}, "a stop without the terminator"),
        ({"flags": int(Flag.NO_TERMINATOR)}, "a stop without the terminator"),
    ],
)
def test_each_broken_promise_is_counted(change: dict[str, Any], what: str) -> None:
    assert broken_promises(table({}, change))[what] == 1
