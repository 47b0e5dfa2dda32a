"""A run from training set to published checkpoint."""

from collections.abc import Callable

import pytest

from dflash_core.drafter.folder import WEIGHTS_FILE
from dflash_core.errors import GateError
from dflash_core.recipe import Recipe
from dflash_core.records import DrafterCheckpoint, RunPointer
from dflash_core.storage.store import Store
from dflash_core.training.metrics import StepMetrics
from dflash_core.training.run import train_drafter
from tests.training.conftest import put_training_set, random_rows


def test_a_run_learns_is_published_and_is_not_repeated(s3: Store, make_recipe: Callable[..., Recipe]) -> None:
    put_training_set(s3, {"file0": random_rows(0, 20), "file1": random_rows(1, 20)})
    recipe = make_recipe(epochs=6, held_out_share=0.2, learning_rate=1e-2)
    seen: list[StepMetrics] = []
    checkpoint = train_drafter(recipe, None, False, seen.append)
    assert [m.step for m in seen] == list(range(1, checkpoint.steps + 1))
    assert seen[0].loss is not None
    assert checkpoint.final_loss < 0.8 * seen[0].loss
    assert s3.get_record(f"drafter_checkpoint/{checkpoint.run}/manifest.json", DrafterCheckpoint) == checkpoint
    assert s3.get_record("drafter_checkpoint/latest.json", RunPointer).run == checkpoint.run
    assert s3.read(checkpoint.weights)
    assert checkpoint.weights.key.endswith(WEIGHTS_FILE)
    assert sum(file.rows for file in checkpoint.coverage) == sum(m.rows for m in seen)
    assert not list(s3.list(f"drafter_checkpoint/{checkpoint.run}/checkpoints/"))
    again: list[StepMetrics] = []
    assert train_drafter(recipe, None, False, again.append) == checkpoint
    assert not again


def test_a_failed_gate_stops_training_unless_accepted_by_name(s3: Store, make_recipe: Callable[..., Recipe]) -> None:
    frozen = put_training_set(s3, {"file0": random_rows(0, 8)}, passed=False)
    with pytest.raises(GateError, match="87 % near-empty"):
        train_drafter(make_recipe(max_steps=1), frozen.hash, False, lambda _: None)
    checkpoint = train_drafter(make_recipe(max_steps=1), frozen.hash, True, lambda _: None)
    assert checkpoint.gate == "accepted although failed"
