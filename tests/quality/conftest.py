"""Rendered rows from a line each, the shortest way to say what a test is about."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from dflash_core.quality.hashes import hash_strings
from dflash_core.quality.statistics import FileStatistics, RenderedRows, file_statistics
from dflash_core.records import Reject


@dataclass(frozen=True)
class Row:
    """What a test wants to say about one rendered row."""

    supervised: int
    row_id: str = ""
    text: str = ""
    flags: int = 0
    dropped: str | None = None
    finish_reason: str | None = "stop"


MakeFile = Callable[..., FileStatistics]


@pytest.fixture(scope="session")
def row() -> type[Row]:
    return Row


@pytest.fixture(scope="session")
def make_file() -> MakeFile:
    """`make_file(partition, rows, rejects)`: one row a line, then one reject a line; ids and texts are unique."""

    def make(partition: str, rows: Sequence[Row], rejects: Sequence[str] = ()) -> FileStatistics:
        n = len(rows)
        supervised = np.array([one.supervised for one in rows], np.int64)
        columns = RenderedRows(
            row_ids=[one.row_id or f"{partition}-{i}" for i, one in enumerate(rows)],
            lines=np.arange(1, n + 1),
            lengths=supervised + 10,
            prompt_tokens=np.full(n, 10),
            supervised=supervised,
            finish_reasons=[one.finish_reason for one in rows],
            flags=np.array([one.flags for one in rows], np.int64),
            text_hashes=hash_strings(one.text or f"{partition} text {i}" for i, one in enumerate(rows)),
            dropped=[one.dropped for one in rows],
        )
        rejected = [Reject(line=n + 1 + i, reason=reason) for i, reason in enumerate(rejects)]
        return file_statistics(partition, columns, rejected, n + len(rejects))

    return make
