"""The gate is a check on the asset and a verdict in the manifest."""

from collections.abc import Callable, Sequence
from pathlib import Path

import dagster as dg
import pytest
from dagster_aws.s3 import S3Resource

from dflash_assets.resources import RecipeResource
from dflash_assets.training_set import training_set
from dflash_core.errors import GateError
from dflash_core.quality.training_set import freeze_training_set, load_training_set, require_gate
from dflash_core.recipe import Recipe, TrainingSetFiles
from dflash_core.records import SourceFile
from dflash_core.storage.store import Store
from dflash_core.tokenization.fingerprint import fingerprint

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


def test_19_of_20_files_are_frozen_and_18_are_refused(
    instance: dg.DagsterInstance,
    recipe: Recipe,
    recipe_file: Path,
    source: Store,
    materialize: Materialize,
    sync: Sync,
    rows: Rows,
) -> None:
    with recipe_file.open("a") as file:
        file.write("[gate]\nmin_coverage = 0.95\n")
    names = [f"part-{number:02d}" for number in range(20)]
    for number, name in enumerate(names):
        source.put(f"{name}.jsonl", b"" if number == 3 else rows(4, name))
    sync()
    failure = materialize(names).failure_data_for_node("completion_files")
    assert failure is not None
    assert failure.user_failure_data is not None
    assert "1 of 20 files failed" in (failure.user_failure_data.description or "")
    checks, result = freeze(instance, recipe_file)
    assert result.success
    assert checks == {"gate": True, "coverage": False}, "19 of 20 are enough, and the other is named"
    frozen = load_training_set(recipe, None)
    assert frozen.missing == ("part-03",)
    assert (len(frozen.shards), frozen.coverage) == (19, 0.95)
    assert require_gate(frozen, False) == "passed"

    source.put("part-04.jsonl", b"")
    assert not materialize(["part-04"]).success
    checks, result = freeze(instance, recipe_file)
    assert result.success, "the refusal is written, too"
    assert checks["gate"] is False
    with pytest.raises(GateError, match="18 of 20"):
        require_gate(load_training_set(recipe, None), False)


def test_any_selection_is_a_training_set(
    recipe: Recipe, source: Store, materialize: Materialize, sync: Sync, rows: Rows
) -> None:
    for name in ("a", "b", "c1", "c2"):
        source.put(f"{name}.jsonl", rows(40, name))
    sync()
    assert materialize(["a", "b", "c1", "c2"]).success
    for selectors, files in ((["a"], ["a"]), (["c?"], ["c1", "c2"]), (["b..c1"], ["b", "c1"])):
        frozen = freeze_training_set(recipe, fingerprint(recipe), selectors)
        assert [shard.partition for shard in frozen.shards] == files
        assert (frozen.coverage, frozen.verdict.passed) == (1.0, True)
    chosen = recipe.model_copy(update={"training_set": TrainingSetFiles(files=("b",))})
    assert [shard.partition for shard in freeze_training_set(chosen, fingerprint(chosen)).shards] == ["b"]
