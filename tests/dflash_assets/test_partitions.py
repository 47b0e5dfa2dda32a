"""The bucket's files are the instance's partitions, and the sensor asks for each version of a file once."""

from collections.abc import Callable
from pathlib import Path

import dagster as dg
from dagster_aws.s3 import S3Resource

from dflash_assets.automation import new_completion_files
from dflash_assets.partitions import sync_partitions
from dflash_assets.resources import RecipeResource
from dflash_core.recipe import Recipe
from dflash_core.storage.store import Store

Rows = Callable[..., bytes]


def test_sync_adds_new_files_and_keeps_vanished_ones(
    instance: dg.DagsterInstance, recipe: Recipe, source: Store, rows: Rows
) -> None:
    for name in ("a.jsonl", "deep/er, file.jsonl"):
        source.put(name, rows(1, name))
    assert set(sync_partitions(instance, recipe).added) == {"a", "deep%2Fer%2C%20file"}
    source.client.delete_object(Bucket=source.bucket, Key=source.prefix + "a.jsonl")
    again = sync_partitions(instance, recipe)
    assert (again.added, again.vanished) == ((), ("a",))
    assert "a" in instance.get_dynamic_partitions("completion_files")


def test_sensor_requests_each_version_of_a_file_once(
    instance: dg.DagsterInstance, recipe_file: Path, source: Store, rows: Rows
) -> None:
    cursor: str | None = None

    def tick() -> list[str]:
        nonlocal cursor
        context = dg.build_sensor_context(instance=instance, cursor=cursor)
        result = new_completion_files(context, recipe=RecipeResource(path=str(recipe_file), s3=S3Resource()))
        assert isinstance(result, dg.SensorResult)
        cursor = result.cursor
        return [request.partition_key for request in result.run_requests or []]

    source.put("a.jsonl", rows(1, "a"))
    source.put("b.jsonl", rows(1, "b"))
    assert tick() == ["a", "b"]
    assert tick() == []
    source.put("b.jsonl", rows(2, "b"))
    assert tick() == ["b"]
    assert tick() == []
