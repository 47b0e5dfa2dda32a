"""64-bit hashes that find duplicates across files: equal in every process and on every machine.

XXH3, whose values its specification fixes: sha256 took 4 % of tokenization, this a tenth of that. Among a million rows
the chance of any false duplicate is about 3e-8.
"""

import base64
from collections.abc import Iterable
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

U64 = NDArray[np.uint64]


def hash_strings(texts: Iterable[str]) -> U64:
    """One hash a string (lone surrogates allowed)."""
    return _hash(text.encode("utf8", "surrogatepass") for text in texts)


def hash_rows(ids: NDArray[np.uint32], offsets: NDArray[np.int64]) -> U64:
    """One hash a row of token ids.

    Args:
        ids: all rows' ids, one after the other.
        offsets: n + 1 row boundaries in `ids`.
    """
    flat, bounds = np.ascontiguousarray(ids, "<u4").data.cast("B"), (offsets * 4).tolist()
    return _hash(flat[a:b] for a, b in pairwise(bounds))


def pack(values: NDArray[np.integer]) -> str:
    """An integer array as base64 of little-endian 64-bit words."""
    return base64.b64encode(values.astype("<u8").tobytes()).decode()


def unpack(text: str) -> U64:
    """Inverse of `pack`."""
    return np.frombuffer(base64.b64decode(text), dtype="<u8").astype(np.uint64, copy=False)


def _hash(parts: "Iterable[bytes | memoryview]") -> U64:
    return np.fromiter((xxh3_64_intdigest(part) for part in parts), np.uint64)
