"""Duplicate rows, found through 64-bit hashes of ids and texts: within one file here, over many files in `merge`.

XXH3, whose values its specification fixes, so that hashes are equal in every process and on every machine: sha256 took
4 % of tokenization, this a tenth of that. Among a million rows the chance of any false duplicate is about 3e-8.
"""

import base64
from collections.abc import Iterable
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from dflash_core.records import Record

FILES_SHOWN = 20
U64 = NDArray[np.uint64]


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


def duplicates_within(partition: str, lines: NDArray[np.int64], ids: U64, texts: U64) -> Duplicates:
    """Those of one file, its rows against each other: with numpy, since 500 rows are not worth a table."""
    _, first, inverse = np.unique(texts, return_index=True, return_inverse=True)
    repeated = np.flatnonzero(first[inverse] != np.arange(len(texts)))
    distinct_ids = np.unique(ids).size
    pairs = np.unique(np.stack([ids, texts], axis=1), axis=0).shape[0] if distinct_ids < len(ids) else len(ids)
    shown = repeated[:1].tolist()
    return Duplicates(
        ids=len(ids) - distinct_ids,
        texts=len(repeated),
        conflicting_ids=pairs - distinct_ids,
        by_file={partition: len(repeated)} if shown else {},
        repeats=tuple(
            Repeat(
                partition=partition,
                line=int(lines[row]),
                first_partition=partition,
                first_line=int(lines[first[inverse[row]]]),
            )
            for row in shown
        ),
    )


def hash_strings(texts: Iterable[str]) -> U64:
    """One hash a string (lone surrogates allowed)."""
    return _hash(text.encode("utf8", "surrogatepass") for text in texts)


def hash_rows(ids: NDArray[np.int32], offsets: NDArray[np.int64]) -> U64:
    """One hash a row of token ids.

    Args:
        ids: all rows' ids, one after the other.
        offsets: n + 1 row boundaries in `ids`.
    """
    flat, bounds = np.ascontiguousarray(ids, "<i4").data.cast("B"), (offsets * 4).tolist()
    return _hash(flat[a:b] for a, b in pairwise(bounds))


def pack(values: NDArray[np.integer]) -> str:
    """An integer array as base64 of little-endian 64-bit words."""
    return base64.b64encode(values.astype("<u8").tobytes()).decode()


def unpack(text: str) -> U64:
    """Inverse of `pack`."""
    return np.frombuffer(base64.b64decode(text), dtype="<u8").astype(np.uint64, copy=False)


def _hash(parts: "Iterable[bytes | memoryview]") -> U64:
    return np.fromiter((xxh3_64_intdigest(part) for part in parts), np.uint64)
