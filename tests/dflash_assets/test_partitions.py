"""The bucket's files are the instance's partitions, and runs take them in contiguous ranges."""

from collections.abc import Callable

import dagster as dg

from dflash_assets.partitions import ranges_of, remember, sync_partitions
from dflash_core.storage.s3 import Store
from dflash_core.workspace import Workspace

Rows = Callable[..., bytes]


def test_sync_adds_new_files_and_keeps_vanished_ones(
    instance: dg.DagsterInstance, workspace: Workspace, source: Store, rows: Rows
) -> None:
    for name in ("a.jsonl", "deep/er, file.jsonl"):
        source.put(name, rows(1, name))
    assert set(sync_partitions(instance, workspace).added) == {"a", "deep%2Fer%2C%20file"}
    source.client.delete_object(Bucket=source.bucket, Key=source.prefix + "a.jsonl")
    again = sync_partitions(instance, workspace)
    assert (again.added, again.vanished) == ((), ("a",))
    assert "a" in instance.get_dynamic_partitions("completion_files")


def test_runs_cover_neighbours_and_nothing_else(instance: dg.DagsterInstance) -> None:
    keys = [f"f{number:03d}" for number in range(600)]
    remember(instance, "completion_files", keys)
    wanted = set(keys) - {"f003", "f300"}
    ranges = ranges_of(instance, wanted)
    assert [len(neighbours) for neighbours in ranges] == [3, 250, 46, 250, 49]
    assert {key for neighbours in ranges for key in neighbours} == wanted
    assert ranges_of(instance, {"f003", "not a key"}) == [["f003"]]
