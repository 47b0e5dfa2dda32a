"""Duplicate rows within and across files, found through 64-bit hashes of ids and texts."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dflash_core.quality.hashes import U64
from dflash_core.records import Record

FILES_SHOWN = 20


@dataclass(frozen=True)
class HashedRows:
    """One file's rendered rows, as far as duplicates go."""

    partition: str
    lines: NDArray[np.int64]
    ids: U64
    texts: U64


class Repeat(Record):
    """A row whose text was seen before, and where."""

    partition: str
    line: int
    first_partition: str
    first_line: int


class Duplicates(Record):
    """Counts of rows beyond the first of their kind; files count in partition order, rows in file order."""

    ids: int
    """Rows whose id occurred before."""
    texts: int
    """Rows whose text (all token ids of the row) occurred before."""
    conflicting_ids: int
    """Further texts under an id that already had one."""
    by_file: dict[str, int]
    """Partition -> rows in it whose text occurred before; only files that have some."""
    repeats: tuple[Repeat, ...]
    """The first row with a repeated text in each of the files with the most of them."""


def find_duplicates(files: Sequence[HashedRows]) -> Duplicates:
    """Exact over all given files (sorted by partition) together."""
    if not files:
        return Duplicates(ids=0, texts=0, conflicting_ids=0, by_file={}, repeats=())
    ids, texts = np.concatenate([f.ids for f in files]), np.concatenate([f.texts for f in files])
    lines = np.concatenate([f.lines for f in files])
    sizes = np.array([len(f.lines) for f in files])
    file_of = np.repeat(np.arange(len(files)), sizes)

    _, first, inverse = np.unique(texts, return_index=True, return_inverse=True)
    repeated = np.flatnonzero(first[inverse] != np.arange(len(texts)))
    per_file = np.bincount(file_of[repeated], minlength=len(files))
    shown = [f for f in np.argsort(-per_file, kind="stable")[:FILES_SHOWN] if per_file[f]]
    rows = repeated[np.searchsorted(file_of[repeated], shown)]

    def place(row: int) -> tuple[str, int]:
        return files[file_of[row]].partition, int(lines[row])

    distinct_ids = np.unique(ids).size
    pairs = np.unique(np.stack([ids, texts], axis=1), axis=0).shape[0] if distinct_ids < len(ids) else len(ids)
    return Duplicates(
        ids=len(ids) - distinct_ids,
        texts=len(repeated),
        conflicting_ids=pairs - distinct_ids,
        by_file={f.partition: int(n) for f, n in zip(files, per_file, strict=True) if n},
        repeats=tuple(_repeat(place(row), place(first[inverse[row]])) for row in rows),
    )


def _repeat(row: tuple[str, int], source: tuple[str, int]) -> Repeat:
    return Repeat(partition=row[0], line=row[1], first_partition=source[0], first_line=source[1])
