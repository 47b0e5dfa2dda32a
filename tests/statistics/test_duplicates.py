"""Duplicates are those of a plain count; hashes are equal exactly where rows are."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dflash_core.statistics.duplicates import hash_rows, pack, unpack
from tests.statistics.rows import ROWS, Row, file_of


@given(ROWS)
def test_duplicates_equal_a_plain_count(lines: list[Row]) -> None:
    rows = [line for line in lines if line.reject is None]
    found = file_of("file", lines).duplicates
    assert found.ids == len(rows) - len({row.row_id for row in rows})
    texts = [tuple(row.ids().tolist()) for row in rows]
    assert found.texts == len(rows) - len(set(texts))
    pairs = {(row.row_id, text) for row, text in zip(rows, texts, strict=True)}
    assert found.conflicting_ids == len(pairs) - len({row.row_id for row in rows})


@given(st.lists(st.lists(st.integers(0, 3), max_size=4), max_size=12))
def test_hashes_are_equal_exactly_where_rows_are(rows: list[list[int]]) -> None:
    flat = np.array([token for row in rows for token in row], np.uint32)
    hashes = hash_rows(flat, np.cumsum([0, *map(len, rows)]))
    assert len(set(hashes.tolist())) == len(set(map(tuple, rows)))
    assert unpack(pack(hashes)).tolist() == hashes.tolist()
