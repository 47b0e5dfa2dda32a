"""A run from training set to published checkpoint."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from dflash_core.drafter.folder import WEIGHTS_FILE
from dflash_core.errors import GateError
from dflash_core.recipe import Recipe
from dflash_core.records import DrafterCheckpoint, RunPointer
from dflash_core.storage.store import Store
from dflash_core.training import publish, run
from dflash_core.training.metrics import StepMetrics
from dflash_core.training.publish import Outcome, RunFiles
from dflash_core.training.run import train_drafter
from tests.training.conftest import put_training_set, random_rows


def test_a_run_learns_is_published_and_is_not_repeated(s3: Store, make_recipe: Callable[..., Recipe]) -> None:
    put_training_set(s3, {"file0": random_rows(0, 20), "file1": random_rows(1, 20)})
    recipe = make_recipe(epochs=6, held_out_share=0.2, learning_rate=1e-2)
    seen: list[StepMetrics] = []
    checkpoint = train_drafter(recipe, None, False, seen.append)
    assert [m.step for m in seen] == list(range(1, checkpoint.steps + 1))
    assert seen[0].loss is not None
    assert checkpoint.final_loss < 0.9 * seen[0].loss
    assert s3.get_record(f"drafter_checkpoint/{checkpoint.run}/manifest.json", DrafterCheckpoint) == checkpoint
    assert s3.get_record("drafter_checkpoint/latest.json", RunPointer).run == checkpoint.run
    assert s3.read(checkpoint.weights)
    assert checkpoint.weights.key.endswith(WEIGHTS_FILE)
    assert checkpoint.settings is not None
    as_it_was = Recipe.model_validate_json(s3.read(checkpoint.settings))
    assert as_it_was == recipe, "which recipe: not its name alone"
    assert sum(file.rows for file in checkpoint.coverage) == sum(m.rows for m in seen)
    assert not list(s3.list(f"drafter_checkpoint/{checkpoint.run}/checkpoints/"))
    again: list[StepMetrics] = []
    assert train_drafter(recipe, None, False, again.append) == checkpoint
    assert not again


def test_what_a_kill_after_the_manifest_left_is_removed_by_the_next_call(
    s3: Store, make_recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    put_training_set(s3, {"file0": random_rows(0, 12)})
    recipe = make_recipe(max_steps=4)
    with monkeypatch.context() as killed:
        killed.setattr(publish, "clear_checkpoints", lambda _remote, _local: None)
        checkpoint = train_drafter(recipe, None, False, lambda _: None)
    remote = f"drafter_checkpoint/{checkpoint.run}/checkpoints/"
    local = recipe.storage.work_dir / "drafter_checkpoint" / checkpoint.run / "checkpoints"
    assert list(s3.list(remote))
    assert list(local.iterdir())
    for _ in range(2):
        assert train_drafter(recipe, None, False, lambda _: None) == checkpoint
        assert not list(s3.list(remote))
        assert not local.exists()


@pytest.mark.parametrize(("published_step", "expected"), [(1, 9.0), (2, 7.0)])
def test_the_manifest_tells_the_held_out_prefix_of_the_published_weights(
    s3: Store,
    make_recipe: Callable[..., Recipe],
    monkeypatch: pytest.MonkeyPatch,
    published_step: int,
    expected: float,
) -> None:
    put_training_set(s3, {"file0": random_rows(0, 12)})

    def publish_run(files: RunFiles, made_from: dict[str, Any], outcome: Outcome, parts: list[str]) -> Any:
        scores = {"held_out_accepted_prefix": 7.0, "best_step": 1, "best_accepted_prefix": 9.0}
        changed = replace(outcome, published_step=published_step, progress=replace(outcome.progress, **scores))
        return publish.publish_run(files, made_from, changed, parts)

    monkeypatch.setattr(run, "publish_run", publish_run)
    checkpoint = train_drafter(make_recipe(max_steps=2), None, False, lambda _: None)
    assert checkpoint.held_out_accepted_prefix == expected
    assert checkpoint.best_accepted_prefix == 9.0


def test_a_failed_gate_stops_training_unless_accepted_by_name(s3: Store, make_recipe: Callable[..., Recipe]) -> None:
    frozen = put_training_set(s3, {"file0": random_rows(0, 8)}, passed=False)
    with pytest.raises(GateError, match="87 % near-empty"):
        train_drafter(make_recipe(max_steps=1), frozen.hash, False, lambda _: None)
    checkpoint = train_drafter(make_recipe(max_steps=1), frozen.hash, True, lambda _: None)
    assert checkpoint.gate == "accepted although failed"
