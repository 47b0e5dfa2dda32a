"""The gate is a check on the asset and a verdict in the manifest."""

from collections.abc import Callable, Sequence
from pathlib import Path

import dagster as dg
import pytest

from dflash_assets.resources import RecipeResource
from dflash_assets.training_set import training_set
from dflash_core.errors import GateError
from dflash_core.recipe import TrainingSetSettings
from dflash_core.records import SourceFile
from dflash_core.storage.s3 import Store
from dflash_core.training_set.freeze import freeze_training_set, load_training_set, require_gate
from dflash_core.workspace import Workspace, connect
from tests.dflash_assets.conftest import require_supervised_tokens

Materialize = Callable[[Sequence[str]], dg.ExecuteInProcessResult]
Sync = Callable[[], tuple[SourceFile, ...]]
Rows = Callable[..., bytes]
Freeze = Callable[[], tuple[dict[str, bool], dg.ExecuteInProcessResult]]


@pytest.fixture
def freeze(instance: dg.DagsterInstance, resources: dict[str, RecipeResource]) -> Freeze:
    """Materialize the training set: what its checks said, and the run."""

    def run() -> tuple[dict[str, bool], dg.ExecuteInProcessResult]:
        result = dg.materialize([training_set], instance=instance, resources=resources, raise_on_error=False)
        return {check.check_name: check.passed for check in result.get_asset_check_evaluations()}, result

    return run


def test_a_bad_file_fails_the_gate_and_a_good_one_passes(
    workspace: Workspace, freeze: Freeze, source: Store, materialize: Materialize, sync: Sync, rows: Rows
) -> None:
    source.put("good.jsonl", rows(40, "good"))
    source.put("bad.jsonl", rows(30, "bad", reasoning="", answer="OK.") + rows(5, "rest"))
    sync()
    assert materialize(["bad", "good"]).success
    checks, result = freeze()
    assert result.success
    assert checks == {"gate": False, "coverage": True}
    refused = load_training_set(workspace.derived)
    assert any("bad" in reason and "spike" in reason for reason in refused.verdict.reasons)

    source.put("bad.jsonl", rows(35, "repaired"))
    assert materialize(["bad"]).success
    checks, _ = freeze()
    assert checks == {"gate": True, "coverage": True}
    assert load_training_set(workspace.derived).hash != refused.hash


def test_dropped_and_rejected_rows_are_told_apart(
    recipe_file: Path, freeze: Freeze, source: Store, materialize: Materialize, sync: Sync, rows: Rows
) -> None:
    require_supervised_tokens(recipe_file, 9)
    for name in ("a", "b"):
        short = rows(2, f"{name}s", reasoning="", answer="7")
        source.put(f"{name}.jsonl", rows(40, name) + short + b"not json\n")
    sync()
    assert materialize(["a", "b"]).success
    _, result = freeze()
    (event,) = result.asset_materializations_for_node("training_set")
    metadata = {name: value.value for name, value in event.metadata.items()}
    expected = {"rows read": 86, "dagster/row_count": 80, "rows dropped": 4, "rows rejected": 2}
    assert {name: metadata[name] for name in expected} == expected
    assert metadata["drop reasons"] == {"too few supervised tokens": 4}
    assert metadata["reject reasons"] == {"invalid JSON": 2}


def test_a_missing_shard_lowers_the_coverage(
    freeze: Freeze, source: Store, materialize: Materialize, sync: Sync, rows: Rows
) -> None:
    for name in ("a", "b"):
        source.put(f"{name}.jsonl", rows(40, name))
    sync()
    assert materialize(["a"]).success
    checks, result = freeze()
    assert result.success
    assert checks == {"gate": False, "coverage": False}


def test_nothing_to_freeze_is_one_sentence(freeze: Freeze, source: Store, rows: Rows) -> None:
    source.put("a.jsonl", rows(4, "a"))
    _, result = freeze()
    failure = result.failure_data_for_node("training_set")
    assert failure is not None
    assert failure.user_failure_data is not None
    assert failure.user_failure_data.description


def test_19_of_20_files_are_frozen_and_18_are_refused(
    workspace: Workspace,
    recipe_file: Path,
    freeze: Freeze,
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
    checks, result = freeze()
    assert result.success
    assert checks == {"gate": True, "coverage": False}, "19 of 20 are enough, and the other is named"
    frozen = load_training_set(workspace.derived)
    assert frozen.missing == ("part-03",)
    assert (len(frozen.shards), frozen.coverage) == (19, 0.95)
    assert require_gate(frozen, False) == "passed"

    source.put("part-04.jsonl", b"")
    assert not materialize(["part-04"]).success
    checks, result = freeze()
    assert result.success, "the refusal is written, too"
    assert checks["gate"] is False
    with pytest.raises(GateError, match="18 of 20"):
        require_gate(load_training_set(workspace.derived), False)


def test_any_selection_is_a_training_set(
    workspace: Workspace, source: Store, materialize: Materialize, sync: Sync, rows: Rows
) -> None:
    for name in ("a", "b", "c1", "c2"):
        source.put(f"{name}.jsonl", rows(40, name))
    sync()
    assert materialize(["a", "b", "c1", "c2"]).success
    for selectors, files in ((["a"], ["a"]), (["c?"], ["c1", "c2"]), (["b..c1"], ["b", "c1"])):
        frozen = freeze_training_set(workspace, selectors)
        assert [shard.partition for shard in frozen.shards] == files
        assert (frozen.coverage, frozen.verdict.passed) == (1.0, True)
    chosen = workspace.recipe.model_copy(update={"training_set": TrainingSetSettings(files=("b",))})
    assert [shard.partition for shard in freeze_training_set(connect(chosen)).shards] == ["b"]
