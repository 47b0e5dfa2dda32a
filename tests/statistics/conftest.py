"""Files of rows as tests of the gate, the training set and its report want them."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from dflash_core.statistics.statistics import FileStatistics
from tests.statistics.rows import Row, file_of

MakeFile = Callable[..., FileStatistics]


@pytest.fixture(scope="session")
def row() -> type[Row]:
    return Row


@pytest.fixture(scope="session")
def make_file() -> MakeFile:
    """`make_file(partition, rows, rejects)`: one row a line, then one reject a line; ids and texts are unique."""

    def make(partition: str, rows: Sequence[Row], rejects: Sequence[str] = ()) -> FileStatistics:
        named = [
            replace(one, row_id=one.row_id or f"{partition}-{i}", text=one.text or f"{partition} text {i}")
            for i, one in enumerate(rows)
        ]
        return file_of(partition, [*named, *(Row(0, reject=reason) for reason in rejects)])

    return make
