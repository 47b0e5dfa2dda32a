"""The gate is a check on the asset and a verdict in the manifest."""

from collections.abc import Callable, Sequence
from pathlib import Path

import dagster as dg
from dagster_aws.s3 import S3Resource

from dflash_assets.resources import RecipeResource
from dflash_assets.training_set import training_set
from dflash_core.quality.training_set import load_training_set
from dflash_core.recipe import Recipe
from dflash_core.records import SourceFile
from dflash_core.storage.store import Store

Materialize = Callable[[Sequence[str]], dg.ExecuteInProcessResult]
Sync = Callable[[], tuple[SourceFile, ...]]
Rows = Callable[..., bytes]


def freeze(instance: dg.DagsterInstance, recipe_file: Path) -> tuple[dict[str, bool], dg.ExecuteInProcessResult]:
    result = dg.materialize(
        [training_set],
        instance=instance,
        resources={"recipe": RecipeResource(path=str(recipe_file), s3=S3Resource())},
        raise_on_error=False,
    )
    return {check.check_name: check.passed for check in result.get_asset_check_evaluations()}, result


def test_a_bad_file_fails_the_gate_and_a_good_one_passes(
    instance: dg.DagsterInstance,
    recipe: Recipe,
    recipe_file: Path,
    source: Store,
    materialize: Materialize,
    sync: Sync,
    rows: Rows,
) -> None:
    source.put("good.jsonl", rows(40, "good"))
    source.put("bad.jsonl", rows(30, "bad", reasoning="", answer="OK.") + rows(5, "rest"))
    sync()
    assert materialize(["bad", "good"]).success
    checks, result = freeze(instance, recipe_file)
    assert result.success
    assert checks == {"gate": False, "coverage": True}
    refused = load_training_set(recipe, None)
    assert any("bad" in reason and "spike" in reason for reason in refused.verdict.reasons)

    source.put("bad.jsonl", rows(35, "repaired"))
    assert materialize(["bad"]).success
    checks, _ = freeze(instance, recipe_file)
    assert checks == {"gate": True, "coverage": True}
    assert load_training_set(recipe, None).hash != refused.hash


def test_a_missing_shard_lowers_the_coverage(
    instance: dg.DagsterInstance, recipe_file: Path, source: Store, materialize: Materialize, sync: Sync, rows: Rows
) -> None:
    for name in ("a", "b"):
        source.put(f"{name}.jsonl", rows(40, name))
    sync()
    assert materialize(["a"]).success
    checks, result = freeze(instance, recipe_file)
    assert result.success
    assert checks == {"gate": False, "coverage": False}


def test_nothing_to_freeze_is_one_sentence(
    instance: dg.DagsterInstance, recipe_file: Path, source: Store, rows: Rows
) -> None:
    source.put("a.jsonl", rows(4, "a"))
    _, result = freeze(instance, recipe_file)
    failure = result.failure_data_for_node("training_set")
    assert failure is not None
    assert failure.user_failure_data is not None
    assert failure.user_failure_data.description
