"""Rendered rows and rejected lines from a line each, the shortest way to say what a test is about."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from dflash_core.records import Reject
from dflash_core.statistics.duplicates import hash_strings
from dflash_core.statistics.statistics import FileStatistics, file_statistics
from dflash_core.tokenization.encode import RowColumns
from dflash_core.tokenization.flags import Flag


@dataclass(frozen=True)
class Row:
    """What a test wants to say about one row."""

    supervised: int
    row_id: str = ""
    text: str = ""
    """Rows of one length have the same ids exactly if they have the same text."""
    flags: int = 0
    dropped: str | None = None
    finish_reason: str | None = "stop"
    prompt: int = 10
    reject: str | None = None
    """Why the row was never rendered."""

    @property
    def length(self) -> int:
        """Tokens of the row."""
        return self.prompt + self.supervised

    def ids(self) -> NDArray[np.int32]:
        """Its tokens."""
        words = hash_strings([self.text]).view(np.int32) & 0x7FFFFFFF
        return np.resize(words, self.length).astype(np.int32)


REASONS = st.sampled_from(["too few supervised tokens", "longer than max_length"])
ROWS = st.lists(
    st.builds(
        Row,
        row_id=st.sampled_from(["a", "b", "c", "ü", "\ud800"]),
        text=st.sampled_from("012345"),
        prompt=st.one_of(st.just(5), st.integers(0, 30)),
        supervised=st.one_of(st.just(6), st.integers(0, 400)),
        finish_reason=st.sampled_from(["stop", "length", None]),
        flags=st.integers(0, (1 << len(Flag)) - 1),
        dropped=st.one_of(st.none(), REASONS),
        reject=st.one_of(st.none(), st.none(), st.sampled_from(["empty completion", "no JSON"])),
    ),
    max_size=60,
)
"""The lines of a file, many with the same text, id or count."""


def file_of(partition: str, lines: Sequence[Row]) -> FileStatistics:
    """The statistics of a file with these lines."""
    rendered = [(number, line) for number, line in enumerate(lines, 1) if line.reject is None]
    rejects = [Reject(line=n, reason=line.reject) for n, line in enumerate(lines, 1) if line.reject is not None]
    rows = [row for _, row in rendered]
    columns = RowColumns(
        row_ids=[row.row_id for row in rows],
        lines=np.array([number for number, _ in rendered], np.int64),
        finish_reasons=[row.finish_reason for row in rows],
        flags=np.array([row.flags for row in rows], np.int64),
        ids=np.concatenate([np.zeros(0, np.int32), *(row.ids() for row in rows)]),
        offsets=np.cumsum([0, *(row.length for row in rows)], dtype=np.int64),
        start=np.array([row.prompt for row in rows], np.int64),
        end=np.array([row.length for row in rows], np.int64),
        dropped=[row.dropped for row in rows],
    )
    return file_statistics(partition, [columns], rejects, len(lines))
