"""Rows as columns: everything of every row, ids cut at the longest length."""

from dataclasses import replace

import numpy as np
import pytest

from dflash_core.tokenization.encode import EncodedRow, columns_of


def test_rows_become_columns_with_their_ids_cut() -> None:
    rows = [
        EncodedRow(f"r{i}", i + 1, "stop" if i else None, i, np.arange(length, dtype=np.int32), 1, length)
        for i, length in enumerate((3, 9, 5))
    ]
    columns = columns_of(rows, 5)
    assert len(columns) == 3
    assert (columns.row_ids, columns.finish_reasons, columns.dropped) == (
        ["r0", "r1", "r2"],
        [None, "stop", "stop"],
        [None] * 3,
    )
    assert columns.ids.tolist() == [0, 1, 2, *range(5), *range(5)]
    assert columns.offsets.tolist() == [0, 3, 8, 13]
    assert (columns.lines.tolist(), columns.flags.tolist()) == ([1, 2, 3], [0, 1, 2])
    assert (columns.start.tolist(), columns.end.tolist()) == ([1, 1, 1], [3, 9, 5])
    assert (len(columns_of([], 5)), columns_of([], 5).offsets.tolist()) == (0, [0])


@pytest.mark.parametrize(
    "column", ["row_ids", "lines", "finish_reasons", "flags", "offsets", "start", "end", "dropped"]
)
def test_columns_of_different_lengths_are_an_error(column: str) -> None:
    columns = columns_of([EncodedRow("a", 1, None, 0, np.zeros(2, np.int32), 0, 2)] * 2, 9)
    with pytest.raises(ValueError, match=f"columns of different lengths: .*'{column}': 1"):
        replace(columns, **{column: getattr(columns, column)[:-1]})
