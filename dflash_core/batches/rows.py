"""Shards of a training set, unpacked once into memory-mapped files: a random row costs microseconds.

One folder per shard below `<work_dir>/rows/<sha256 of the shard>/`, written under another name and renamed. The
trade-off: 4 bytes a token of local disk, against decompressing a whole shard for one row. Every file's sha256 is
checked when the cache is opened (which reads pages that training is about to read anyway); a damaged or foreign folder
is made again.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dflash_core.errors import ObjectCorrupt, StorageError
from dflash_core.local_files import sha256_file
from dflash_core.records import TrainingSet, TrainingSetShard
from dflash_core.shards.arrow import read_shard
from dflash_core.storage.s3 import Store

TokensAndMask = tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]
"""[S] token ids, and [S] true where the token is supervised."""
FORMAT = 2
ARRAYS = ("ids", "offsets", "spans", "span_offsets", "row_ids", "lines")


@dataclass(frozen=True)
class ShardRows:
    """The rows of one shard. `ids` is memory-mapped, the rest is small."""

    ids: npt.NDArray[np.int32]
    """[T] tokens of all rows, one after the other."""
    offsets: npt.NDArray[np.int64]
    """[R + 1] where row i begins in `ids`."""
    spans: npt.NDArray[np.int32]
    """[M, 2] supervised spans (start, end), counted from the row's first token."""
    span_offsets: npt.NDArray[np.int64]
    """[R + 1] where row i begins in `spans`."""
    row_ids: npt.NDArray[np.str_]
    lines: npt.NDArray[np.int64]
    """[R] line in the source file; the turns of one conversation share it."""

    def row(self, index: int) -> TokensAndMask:
        """Row `index` of this shard."""
        start, end = int(self.offsets[index]), int(self.offsets[index + 1])
        mask = np.zeros(end - start, dtype=np.bool_)
        for first, last in self.spans[self.span_offsets[index] : self.span_offsets[index + 1]]:
            mask[first:last] = True
        ids: npt.NDArray[np.int32] = self.ids[start:end]
        return ids, mask

    def conversations(self) -> list[str]:
        """[R] the id of each row's conversation: the row's own, without the turn's number where a line has several."""
        _, place, turns = np.unique(self.lines, return_inverse=True, return_counts=True)
        return [
            str(n).rpartition("#")[0] if several else str(n)
            for n, several in zip(self.row_ids, turns[place] > 1, strict=True)
        ]


class RowStore:
    """Random access to all rows of a training set, in the order of its shards."""

    def __init__(self, partitions: Sequence[str], shards: Sequence[ShardRows]) -> None:
        self.partitions = tuple(partitions)
        self._shards = tuple(shards)
        counts = [len(shard.row_ids) for shard in shards]
        self._first = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
        self.files = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
        """[R] index into `partitions` of each row."""
        self.row_ids: list[str] = [str(name) for shard in shards for name in shard.row_ids]
        self.conversations: list[str] = [name for shard in shards for name in shard.conversations()]
        self.lengths: npt.NDArray[np.int32] = np.concatenate(
            [np.diff(shard.offsets).astype(np.int32) for shard in shards] or [np.zeros(0, np.int32)]
        )
        """[R] tokens of each row."""

    def __len__(self) -> int:
        return len(self.row_ids)

    def row(self, index: int) -> TokensAndMask:
        """Row `index` of the training set. Ids and mask come together, so their lengths cannot differ."""
        file = int(self.files[index])
        return self._shards[file].row(int(index - self._first[file]))

    def largest_id(self) -> int:
        """The largest token id of all rows (reads every page)."""
        return max((int(shard.ids.max()) for shard in self._shards if shard.ids.size), default=-1)


def open_rows(store: Store, training_set: TrainingSet, work_dir: Path, downloads: int) -> RowStore:
    """Download and unpack what is not yet in the cache, `downloads` shards at a time, and open all of it.

    Raises:
        StorageError: a shard cannot be read, is not what the training set's manifest says, or the disk is full.
    """
    cache = work_dir / "rows"
    with ThreadPoolExecutor(max_workers=downloads) as pool:
        shards = list(pool.map(lambda entry: _open_shard(store, entry, cache), training_set.shards))
    return RowStore([entry.partition for entry in training_set.shards], shards)


def _open_shard(store: Store, entry: TrainingSetShard, cache: Path) -> ShardRows:
    folder = cache / entry.shard.sha256
    if not _is_whole(folder):
        arrays = unpack(read_shard(store.read(entry.shard)))
        if len(arrays["row_ids"]) != entry.rows or len(arrays["ids"]) != entry.tokens:
            raise ObjectCorrupt(
                f"{store.uri(entry.shard.key)} holds {len(arrays['row_ids'])} rows and {len(arrays['ids'])} tokens, "
                f"the training set says {entry.rows} and {entry.tokens}; freeze the training set again"
            )
        _write(folder, arrays)
    loaded: dict[str, Any] = {
        name: np.load(folder / f"{name}.npy", mmap_mode="r" if name == "ids" else None) for name in ARRAYS
    }
    return ShardRows(**loaded)


def unpack(table: pa.Table) -> dict[str, npt.NDArray[np.generic]]:
    """The arrays of `ShardRows` from a shard's table."""
    ids = _column(table, "input_ids")
    spans = _column(table, "loss_spans")
    pairs = spans.flatten()
    bounds = [pairs.field(name).to_numpy(zero_copy_only=False) for name in ("start", "end")]
    return {
        "ids": ids.flatten().to_numpy(zero_copy_only=False).astype(np.int32),
        "offsets": _offsets(ids),
        "spans": np.stack(bounds, axis=1).astype(np.int32),
        "span_offsets": _offsets(spans),
        "row_ids": np.asarray(table.column("row_id").to_pylist(), dtype=np.str_),
        "lines": table.column("source_line").to_numpy(),
    }


def _column(table: pa.Table, name: str) -> pa.ListArray:
    column = table.column(name).combine_chunks()
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column


def _offsets(lists: pa.ListArray) -> npt.NDArray[np.int64]:
    lengths = lists.value_lengths().to_numpy(zero_copy_only=False)
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])


def _write(folder: Path, arrays: dict[str, npt.NDArray[np.generic]]) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=".unpacking-", dir=folder.parent))
    try:
        for name in ARRAYS:
            np.save(aside / f"{name}.npy", arrays[name])
        index = {"format": FORMAT, "sha256": {name: sha256_file(aside / f"{name}.npy") for name in ARRAYS}}
        (aside / "index.json").write_text(json.dumps(index), encoding="utf8")
        shutil.rmtree(folder, ignore_errors=True)
        os.rename(aside, folder)
    except OSError as error:
        if not _is_whole(folder):  # another process of this machine may have been faster
            raise StorageError(
                f"cannot unpack a shard into {folder}: {error}; free disk space or set storage.work_dir"
            ) from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _is_whole(folder: Path) -> bool:
    try:
        index = json.loads((folder / "index.json").read_text(encoding="utf8"))
        return bool(
            index == {"format": FORMAT, "sha256": {name: sha256_file(folder / f"{name}.npy") for name in ARRAYS}}
        )
    except (OSError, ValueError):
        return False
