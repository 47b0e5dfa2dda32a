"""The row cache: what is in the shards comes out, whatever happened to the local copy."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dflash_core.batches.rows import RowStore, open_rows
from dflash_core.errors import ObjectCorrupt, ObjectMissing
from dflash_core.records import TrainingSet
from dflash_core.storage.s3 import Store
from tests.training.conftest import put_training_set, random_rows

FILES = {"a": random_rows(0, 7), "b": random_rows(1, 5)}


@pytest.fixture
def frozen(s3: Store) -> TrainingSet:
    return put_training_set(s3, FILES)


def check(rows: RowStore) -> None:
    expected = [row for partition in FILES for row in FILES[partition]]
    assert rows.row_ids == [row_id for row_id, _, _ in expected]
    assert rows.partitions == tuple(FILES)
    assert [rows.partitions[i] for i in rows.files] == ["a"] * 7 + ["b"] * 5
    for index, (_, ids, spans) in enumerate(expected):
        found, mask = rows.row(index)
        assert found.tolist() == ids
        assert np.flatnonzero(mask).tolist() == [i for a, b in spans for i in range(a, b)]
        assert rows.lengths[index] == len(ids)
    assert rows.largest_id() == max(max(ids) for _, ids, _ in expected)


def test_rows_come_back_as_they_were_written(s3: Store, frozen: TrainingSet, tmp_path: Path) -> None:
    check(open_rows(s3, frozen, tmp_path, 2))


def test_a_filled_cache_needs_no_store(s3: Store, frozen: TrainingSet, tmp_path: Path) -> None:
    open_rows(s3, frozen, tmp_path, 2)
    for shard in frozen.shards:
        s3.delete(shard.shard.key)
    check(open_rows(s3, frozen, tmp_path, 2))


def flip(path: Path) -> None:
    body = bytearray(path.read_bytes())
    body[-3] ^= 1
    path.write_bytes(body)


@pytest.mark.parametrize(
    "damage",
    [flip, lambda path: path.unlink(), lambda path: path.write_bytes(path.read_bytes()[:-8])],
    ids=["flipped", "missing", "cut"],
)
@pytest.mark.parametrize("name", ["ids.npy", "spans.npy", "index.json"])
def test_a_damaged_cache_is_made_again(
    s3: Store, frozen: TrainingSet, tmp_path: Path, name: str, damage: Callable[[Path], None]
) -> None:
    open_rows(s3, frozen, tmp_path, 2)
    damage(tmp_path / "rows" / frozen.shards[0].shard.sha256 / name)
    check(open_rows(s3, frozen, tmp_path, 2))
    assert not list((tmp_path / "rows").glob(".unpacking-*"))


def test_damaged_or_missing_shards_are_refused(s3: Store, frozen: TrainingSet, tmp_path: Path) -> None:
    stored = frozen.shards[0].shard
    s3.put(stored.key, b"something else")
    with pytest.raises(ObjectCorrupt, match="was damaged or overwritten"):
        open_rows(s3, frozen, tmp_path, 2)
    s3.delete(stored.key)
    with pytest.raises(ObjectMissing):
        open_rows(s3, frozen, tmp_path, 2)


def test_a_training_set_that_counts_other_rows_is_refused(s3: Store, frozen: TrainingSet, tmp_path: Path) -> None:
    wrong = frozen.model_copy(update={"shards": (frozen.shards[0].model_copy(update={"rows": 6}), *frozen.shards[1:])})
    with pytest.raises(ObjectCorrupt, match="holds 7 rows"):
        open_rows(s3, wrong, tmp_path, 2)
