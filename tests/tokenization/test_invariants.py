"""A shard of the real pipeline keeps every promise on loss masks, and each kind of broken row is found."""

from typing import Any

import pyarrow as pa
import pytest

from dflash_core.quality.flags import Flag
from dflash_core.tokenization.invariants import broken_invariants
from dflash_core.tokenization.shards import SCHEMA

END = 9


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
    assert broken_invariants(table(cut, by_length, turns)) == {}
    assert broken_invariants(table().slice(0, 0)) == {}


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
    assert broken_invariants(table({}, change))[what] == 1
