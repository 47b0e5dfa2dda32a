"""A changed object makes training set and drafter stale in a check; a bad shard breaks the invariants' one."""

import io
from collections.abc import Callable, Sequence
from pathlib import Path

import dagster as dg
import pytest
from dagster_aws.s3 import S3Resource
from rich.console import Console

from dflash_assets import completion_files
from dflash_assets.checks import drift_evaluation, shards_current, sources_current, trained_on_current_shards
from dflash_assets.resources import RecipeResource
from dflash_assets.status import read_status, render
from dflash_core.quality.training_set import freeze_training_set
from dflash_core.recipe import Recipe, load_recipe
from dflash_core.records import DrafterCheckpoint, RunPointer, SourceFile, StoredObject
from dflash_core.storage.store import Store, open_stores
from dflash_core.tokenization.fingerprint import fingerprint

Materialize = Callable[[Sequence[str]], dg.ExecuteInProcessResult]
Sync = Callable[[], tuple[SourceFile, ...]]
Rows = Callable[..., bytes]


def test_a_changed_file_makes_training_set_and_drafter_stale(
    recipe: Recipe, recipe_file: Path, source: Store, materialize: Materialize, sync: Sync, rows: Rows
) -> None:
    def verdicts() -> list[bool | None]:
        resource = RecipeResource(path=str(recipe_file), s3=S3Resource())
        results = [check(recipe=resource) for check in (sources_current, trained_on_current_shards)]
        events = drift_evaluation(load_recipe(recipe_file), sync(), pytest.fail)
        assert [event.passed for event in events] == [r.passed for r in results if "yet" not in (r.description or "")]
        return [result.passed for result in results]

    for name in ("a", "b"):
        source.put(f"{name}.jsonl", rows(40, name))
    sync()
    assert verdicts() == [True, True], "nothing to be stale"
    assert materialize(["a", "b"]).success
    frozen = freeze_training_set(recipe, fingerprint(recipe))
    derived, nowhere = open_stores(recipe).derived, StoredObject(key="k", size=1, sha256="0")
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
    derived.put_record("drafter_checkpoint/r/manifest.json", checkpoint)
    derived.put_record("drafter_checkpoint/latest.json", RunPointer(run="r"))
    assert verdicts() == [True, True]

    source.put("c.jsonl", rows(40, "c"))
    assert verdicts() == [True, True], "a new file makes nothing wrong"
    source.put("b.jsonl", rows(41, "b"))
    assert verdicts() == [False, False]
    sync()
    assert materialize(["b"]).success
    latest = freeze_training_set(recipe, fingerprint(recipe))
    assert verdicts() == [True, False], "a new training set, but not yet a new drafter"

    derived.put_record(
        "drafter_checkpoint/r/manifest.json", checkpoint.model_copy(update={"training_set": latest.hash})
    )
    assert verdicts() == [True, True]
    recipe_file.write_text(recipe_file.read_text().replace("[tokenization]", "[tokenization]\nmax_length = 777"))
    assert verdicts() == [True, False], "the same files, but other rows would be made of them"
    found = trained_on_current_shards(recipe=RecipeResource(path=str(recipe_file), s3=S3Resource()))
    assert isinstance(found, dg.AssetCheckResult)
    for part in (latest.fingerprint, fingerprint(load_recipe(recipe_file))):
        assert part in str(found.description)


def test_a_changed_file_makes_its_shard_stale_before_anything_is_frozen(
    instance: dg.DagsterInstance,
    recipe_file: Path,
    source: Store,
    materialize: Materialize,
    sync: Sync,
    rows: Rows,
) -> None:
    def verdict() -> tuple[bool, str]:
        resource = RecipeResource(path=str(recipe_file), s3=S3Resource())
        result = shards_current(dg.build_asset_check_context(instance=instance), recipe=resource)
        assert isinstance(result, dg.AssetCheckResult)
        return result.passed, str(result.metadata["files"].value)

    def status() -> dict[str, dict[str, int]]:
        return {
            asset: dict(states) for asset, states in read_status(instance, load_recipe(recipe_file)).partitions.items()
        }

    for name in ("a", "b", "later"):
        source.put(f"{name}.jsonl", rows(4, name))
    sync()
    assert verdict() == (True, "none"), "nothing that could be stale"
    assert materialize(["a", "b"]).success
    assert verdict() == (True, "none")
    source.put("b.jsonl", rows(5, "b"))
    assert verdict() == (False, "- b: older than the source file")
    for asset in ("raw_completions", "tokenized_shards", "loss_mask_stats"):
        assert status()[asset] == {"materialized": 1, "stale": 1, "missing": 1}
    assert materialize(["b"]).success
    assert verdict()[0]

    recipe_file.write_text(recipe_file.read_text().replace("[tokenization]", "[tokenization]\nmax_length = 777"))
    assert verdict()[1].count("in another way than the recipe now says") == 2
    assert status()["raw_completions"] == {"materialized": 2, "missing": 1}
    assert status()["tokenized_shards"] == {"stale": 2, "missing": 1}
    recipe_file.write_text(recipe_file.read_text().replace("demo/target", "demo/nothing"))
    console = Console(width=250, file=io.StringIO())
    console.print(render(read_status(instance, load_recipe(recipe_file))))
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
    monkeypatch.setattr(completion_files, "broken_invariants", lambda table: {"no supervised token": 1})
    assert checks() == {"rows_conserved": True, "mask_invariants": False}
