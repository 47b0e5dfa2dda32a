"""A changed object makes training set and drafter stale in a check, a harmed one its shard; bad masks are seen."""

import io
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

import dagster as dg
import pytest
from rich.console import Console

from dflash_assets import completion_files
from dflash_assets.automation import new_completion_files
from dflash_assets.checks import drift_evaluation, shards_current, sources_current, trained_on_current_shards
from dflash_assets.partitions import NAME, RANGE_END, RANGE_START
from dflash_assets.reruns import schedules
from dflash_assets.resources import RecipeResource
from dflash_assets.status import read_status, render
from dflash_core.recipe import load_recipe
from dflash_core.records import DrafterCheckpoint, RunPointer, SourceFile, StoredObject
from dflash_core.storage.layout import LATEST_RUN, RunKeys, ShardKeys
from dflash_core.storage.s3 import Store
from dflash_core.tokenization.tokenizer import fingerprint
from dflash_core.training_set.freeze import freeze_training_set
from dflash_core.workspace import Workspace, connect

Materialize = Callable[[Sequence[str]], dg.ExecuteInProcessResult]
Sync = Callable[[], tuple[SourceFile, ...]]
Rows = Callable[..., bytes]


def test_a_changed_file_makes_training_set_and_drafter_stale(
    workspace: Workspace,
    recipe_file: Path,
    resources: dict[str, RecipeResource],
    source: Store,
    materialize: Materialize,
    sync: Sync,
    rows: Rows,
) -> None:
    def verdicts() -> list[bool | None]:
        results = [check(**resources) for check in (sources_current, trained_on_current_shards)]
        events = drift_evaluation(connect(load_recipe(recipe_file)), sync(), pytest.fail)
        assert [event.passed for event in events] == [r.passed for r in results if "yet" not in (r.description or "")]
        return [result.passed for result in results]

    for name in ("a", "b"):
        source.put(f"{name}.jsonl", rows(40, name))
    sync()
    assert verdicts() == [True, True], "nothing to be stale"
    assert materialize(["a", "b"]).success
    frozen = freeze_training_set(workspace)
    derived, nowhere = workspace.derived, StoredObject(key="k", size=1, sha256="0")
    checkpoint = DrafterCheckpoint(
        run="r",
        recipe="test",
        code_version="1",
        training_set=frozen.hash,
        gate="passed",
        target_fingerprint="t",
        tokenizer_sha256="t",
        steps=1,
        train_s=1,
        final_loss=1,
        held_out_accepted_prefix=1,
        weights=nowhere,
        config=nowhere,
        metrics=nowhere,
        coverage=(),
        skipped_steps=0,
        skipped_rows=0,
    )
    derived.put_record(RunKeys("r").manifest, checkpoint)
    derived.put_record(LATEST_RUN, RunPointer(run="r"))
    assert verdicts() == [True, True]

    source.put("c.jsonl", rows(40, "c"))
    assert verdicts() == [True, True], "a new file makes nothing wrong"
    source.put("b.jsonl", rows(41, "b"))
    assert verdicts() == [False, False]
    sync()
    assert materialize(["b"]).success
    latest = freeze_training_set(workspace)
    assert verdicts() == [True, False], "a new training set, but not yet a new drafter"

    derived.put_record(RunKeys("r").manifest, checkpoint.model_copy(update={"training_set": latest.hash}))
    assert verdicts() == [True, True]
    recipe_file.write_text(recipe_file.read_text().replace("[tokenization]", "[tokenization]\nmax_length = 777"))
    assert verdicts() == [True, False], "the same files, but other rows would be made of them"
    found = trained_on_current_shards(**resources)
    assert isinstance(found, dg.AssetCheckResult)
    for part in (latest.fingerprint, fingerprint(load_recipe(recipe_file))):
        assert part in str(found.description)


def test_a_changed_file_makes_its_shard_stale_before_anything_is_frozen(
    instance: dg.DagsterInstance,
    recipe_file: Path,
    resources: dict[str, RecipeResource],
    source: Store,
    materialize: Materialize,
    sync: Sync,
    rows: Rows,
) -> None:
    def verdict() -> tuple[bool, str]:
        result = shards_current(dg.build_asset_check_context(instance=instance), **resources)
        assert isinstance(result, dg.AssetCheckResult)
        return result.passed, str(result.metadata["files"].value)

    def status(asset: str) -> dict[str, int]:
        found = read_status(instance, connect(load_recipe(recipe_file))).partitions
        return dict(Counter(found.filter(asset=asset)["state"]))

    for name in ("a", "b", "later"):
        source.put(f"{name}.jsonl", rows(4, name))
    sync()
    assert verdict() == (True, "none"), "nothing that could be stale"
    assert materialize(["a", "b"]).success
    assert verdict() == (True, "none")
    source.put("b.jsonl", rows(5, "b"))
    assert verdict() == (False, "- b: older than the source file")
    for asset in ("raw_completions", "tokenized_shards", "loss_mask_stats"):
        assert status(asset) == {"materialized": 1, "stale": 1, "missing": 1}
    assert materialize(["b"]).success
    assert verdict()[0]

    recipe_file.write_text(recipe_file.read_text().replace("[tokenization]", "[tokenization]\nmax_length = 777"))
    assert verdict()[1].count("in another way than the recipe now says") == 2
    assert status("raw_completions") == {"materialized": 2, "missing": 1}
    assert status("tokenized_shards") == {"stale": 2, "missing": 1}
    recipe_file.write_text(recipe_file.read_text().replace("demo/target", "demo/nothing"))
    console = Console(width=250, file=io.StringIO())
    console.print(render(read_status(instance, connect(load_recipe(recipe_file)))))
    assert "what is stale cannot be said" in console.file.getvalue()  # type: ignore[attr-defined]


def test_a_broken_shard_is_seen(
    source: Store, materialize: Materialize, sync: Sync, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b"):
        source.put(f"{name}.jsonl", rows(4, name))
    sync()

    def checks() -> dict[str, bool]:
        return {check.check_name: check.passed for check in materialize(["a", "b"]).get_asset_check_evaluations()}

    assert checks() == {"rows_conserved": True, "mask_invariants": True}
    monkeypatch.setattr(completion_files, "broken_promises", lambda table: {"no supervised token": 1})
    assert checks() == {"rows_conserved": True, "mask_invariants": False}


def test_what_happened_to_an_object_is_seen_by_everyone_who_asks(
    instance: dg.DagsterInstance,
    resources: dict[str, RecipeResource],
    workspace: Workspace,
    source: Store,
    materialize: Materialize,
    sync: Sync,
    rows: Rows,
) -> None:
    """The check, `dflash status`, the night, the sensor's first look and the training set follow one rule."""

    def checked() -> set[str]:
        result = shards_current(dg.build_asset_check_context(instance=instance), **resources)
        assert isinstance(result, dg.AssetCheckResult)
        text = str(result.metadata["files"].value)
        assert result.passed is (text == "none")
        assert "damaged" in text or result.passed
        return {line.removeprefix("- ").partition(":")[0] for line in text.splitlines() if line != "none"}

    def shown() -> set[str]:
        status = read_status(instance, workspace)
        for asset in ("tokenized_shards", "loss_mask_stats"):
            stale = status.partitions.filter(asset=asset, state="stale")["partition"]
            assert set(stale) == set(status.stale)
        return set(status.stale)

    def asked(requests: Sequence[dg.RunRequest]) -> set[str]:
        order = list(instance.get_dynamic_partitions(NAME))
        ranges = [(order.index(r.tags[RANGE_START]), order.index(r.tags[RANGE_END]) + 1) for r in requests]
        return {key for first, end in ranges for key in order[first:end]}

    def nightly() -> set[str]:
        (schedule,) = [one for one in schedules(workspace.recipe.automation) if one.name == "nightly_lineage"]
        with dg.build_schedule_context(instance, datetime(2026, 1, 2, 2, tzinfo=UTC), resources) as context:
            requests = schedule(context)
        assert isinstance(requests, list)
        return asked(requests)

    def first_tick() -> set[str]:
        with dg.build_sensor_context(instance, None, resources=resources) as context:
            result = new_completion_files(context)
        assert isinstance(result, dg.SensorResult)
        return asked(result.run_requests or [])

    name_of = fingerprint(workspace.recipe)
    objects = {
        f"{kind}-{harm}": getattr(ShardKeys(name_of, f"{kind}-{harm}"), kind)
        for kind in ("rejects", "shard", "statistics")
        for harm in ("deleted", "replaced", "shortened")
    }
    for name in ("a-good", *objects):
        source.put(f"{name}.jsonl", rows(40, name) + b"not json\n")
    names = [file.partition for file in sync()]
    assert materialize(names).success
    assert checked() == shown() == set()
    assert nightly() == {"a-good"}, "the first file begins a night in which nothing is due"

    derived = workspace.derived
    for name, key in objects.items():
        whole = derived.get(key).body
        match name.partition("-")[2]:
            case "deleted":
                derived.delete(key)
            case "replaced":
                derived.put(key, whole[:-1] + bytes([whole[-1] ^ 1]))
            case "shortened":
                derived.put(key, whole[:-1])
    assert checked() == shown() == nightly() == set(objects)
    assert set(freeze_training_set(workspace).missing) == set(objects)
    assert first_tick() == set(objects)

    assert materialize(names).success
    assert checked() == shown() == set()
    assert nightly() == {"a-good"}
    assert freeze_training_set(workspace).missing == ()
