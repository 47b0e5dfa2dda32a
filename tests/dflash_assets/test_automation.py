"""The sensor asks for each version of a file once, whatever its name, in few runs, also after a crash."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import dagster as dg
import pytest

from dflash_assets.automation import ASKED_FOR, RUNS_PER_TICK, new_completion_files
from dflash_assets.partitions import FILES_PER_RUN, NAME, RANGE_END, RANGE_START
from dflash_assets.resources import RecipeResource
from dflash_core.records import SourceFile
from dflash_core.storage.layout import TrainingSetKeys
from dflash_core.storage.partitions import object_key
from dflash_core.storage.s3 import Store
from dflash_core.training_set.freeze import freeze_training_set
from dflash_core.workspace import Workspace

Rows = Callable[..., bytes]
Materialize = Callable[[Sequence[str]], dg.ExecuteInProcessResult]
Sync = Callable[[], tuple[SourceFile, ...]]
HOSTILE = ("sub/dir/file 1.jsonl", "a,b...c.jsonl", 'quote"s [1].jsonl', "Größe 尺寸 😀.jsonl.gz", "100%.jsonl.zst")


@dataclass
class Sensor:
    """The sensor with its cursor, as the daemon keeps it."""

    instance: dg.DagsterInstance
    resources: dict[str, RecipeResource]
    cursor: str | None = None
    last: dg.SensorResult | None = None

    def evaluate(self) -> list[dg.RunRequest]:
        with dg.build_sensor_context(self.instance, self.cursor, resources=self.resources) as context:
            result = new_completion_files(context)
        assert isinstance(result, dg.SensorResult)
        self.last = result
        return list(result.run_requests or [])

    def tick(self) -> list[str]:
        """The partitions asked for; the daemon then does with cursor and events what it does."""
        keys = self.instance.get_dynamic_partitions
        requests = self.evaluate()
        assert self.last is not None
        self.cursor = self.last.cursor
        for event in self.last.asset_events:
            self.instance.report_runless_asset_event(event)
        order = list(keys(NAME))
        return [
            key
            for request in requests
            for key in order[order.index(request.tags[RANGE_START]) : order.index(request.tags[RANGE_END]) + 1]
        ]


@pytest.fixture
def sensor(instance: dg.DagsterInstance, resources: dict[str, RecipeResource]) -> Sensor:
    return Sensor(instance, resources)


def test_each_version_is_asked_for_once(sensor: Sensor, source: Store, rows: Rows) -> None:
    first, second = rows(1, "b"), rows(2, "b")
    source.put("a.jsonl", rows(1, "a"))
    source.put("b.jsonl", first)
    assert sensor.tick() == ["a", "b"]
    assert sensor.tick() == []
    assert len(sensor.cursor or "") < 100, "the cursor is stored with every tick"
    keys = set()
    for body in (second, first, second):
        source.put("b.jsonl", body)
        (request,) = sensor.evaluate()
        keys.add(request.run_key)
        assert sensor.tick() == ["b"]
        assert sensor.tick() == []
    assert len(keys) == 3, "a version that comes back is a run of its own"


def test_a_tick_that_was_lost_is_asked_again_under_the_same_run_keys(sensor: Sensor, source: Store, rows: Rows) -> None:
    source.put("a.jsonl", rows(1, "a"))
    sensor.tick()
    source.put("b.jsonl", rows(1, "b"))
    lost = [request.run_key for request in sensor.evaluate()]
    assert [request.run_key for request in sensor.evaluate()] == lost
    assert sensor.tick() == ["b"]


def test_a_vanished_file_is_noted_once_and_kept(sensor: Sensor, source: Store, rows: Rows) -> None:
    for name in ("a", "b"):
        source.put(f"{name}.jsonl", rows(1, name))
    sensor.tick()
    sensor.tick()
    source.client.delete_object(Bucket=source.bucket, Key=source.prefix + "a.jsonl")
    for _ in range(2):
        assert sensor.tick() == []
    page = dg.AssetRecordsFilter(dg.AssetKey("raw_completions"), asset_partitions=["a"])
    (record,) = sensor.instance.fetch_observations(page, limit=10).records
    assert record.asset_observation is not None
    assert record.asset_observation.metadata["state"].value == "vanished"
    assert "a" in sensor.instance.get_dynamic_partitions(NAME)


def test_what_a_backfill_did_is_not_asked_for_but_what_changed_since_is(
    sensor: Sensor, source: Store, materialize: Materialize, sync: Sync, rows: Rows
) -> None:
    for name in ("a", "b"):
        source.put(f"{name}.jsonl", rows(4, name))
    sync()
    assert materialize(["a", "b"]).success
    source.put("b.jsonl", rows(5, "b"))
    assert sensor.tick() == ["b"]


def test_hostile_names_round_trip(sensor: Sensor, source: Store, materialize: Materialize, rows: Rows) -> None:
    for name in HOSTILE:
        source.put(name, rows(4, name) if name.endswith(".jsonl") else b"not compressed")
    asked = sensor.tick()
    assert {object_key(key, "") for key in asked} == set(HOSTILE)
    assert not materialize(asked).success
    for name, key in zip(sorted(HOSTILE), sorted(asked, key=lambda key: object_key(key, "")), strict=True):
        kind = sensor.instance.fetch_materializations if name.endswith(".jsonl") else sensor.instance.fetch_observations
        page = dg.AssetRecordsFilter(dg.AssetKey("tokenized_shards"), asset_partitions=[key])
        assert len(kind(page, limit=10).records) == 1, name


@pytest.mark.parametrize("harm", ["deleted", "damaged"])
def test_a_training_set_that_cannot_be_read_stops_no_file(
    sensor: Sensor, workspace: Workspace, source: Store, materialize: Materialize, sync: Sync, rows: Rows, harm: str
) -> None:
    source.put("a.jsonl", rows(4, "a"))
    sync()
    assert materialize(["a"]).success
    derived, key = workspace.derived, TrainingSetKeys(freeze_training_set(workspace).hash).manifest
    if harm == "deleted":
        derived.delete(key)
    else:
        derived.put(key, b"{}")
    source.put("b.jsonl", rows(4, "b"))
    assert sensor.tick() == ["b"]
    assert sensor.last is not None
    assert list(sensor.last.asset_events) == []


@pytest.mark.services
def test_ten_thousand_files_are_seen_in_one_tick_and_asked_for_in_bounded_runs(sensor: Sensor, source: Store) -> None:
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda number: source.put(f"part-{number:05d}.jsonl", b"{}\n"), range(10_000)))
    began = time.monotonic()
    asked = sensor.tick()
    seconds = time.monotonic() - began
    assert len(sensor.instance.get_dynamic_partitions(NAME)) == 10_000
    assert len(asked) == len(set(asked)) == 10_000
    assert sensor.last is not None
    assert len(sensor.last.run_requests or []) == 10_000 // FILES_PER_RUN < RUNS_PER_TICK
    assert sensor.tick() == []
    assert len(sensor.instance.get_dynamic_partitions(ASKED_FOR)) == 10_000
    print(f"10,000 new files: {seconds:.1f} s")
    assert seconds < 180, "Dagster gives a sensor 60 s; a busy machine three times that"
