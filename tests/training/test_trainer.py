"""The loop's decisions: what ends a run, what a run starts from, what it measures."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_core.drafter.config import drafter_config
from dflash_core.drafter.folder import load_drafter, save_drafter
from dflash_core.errors import IncompatibleError, StorageError, UserError
from dflash_core.recipe import Recipe
from dflash_core.records import DrafterCheckpoint, StoredObject, TrainingSet
from dflash_core.storage.s3 import Store
from dflash_core.target.files import read_target_config
from dflash_core.target.hooked import HookedTarget
from dflash_core.training.job import Job
from dflash_core.training.metrics import StepMetrics
from dflash_core.training.step import Learner, Outcome
from dflash_core.training.train import make_learner, train
from dflash_core.workspace import connect
from tests.training.conftest import put_training_set, random_rows


@pytest.fixture
def frozen(s3: Store) -> TrainingSet:
    return put_training_set(s3, {"file0": random_rows(0, 20), "file1": random_rows(1, 20)})


def trained(recipe: Recipe, frozen: TrainingSet) -> tuple[DrafterCheckpoint, list[StepMetrics]]:
    seen: list[StepMetrics] = []
    return train(connect(recipe), Job(frozen.hash), seen.append), seen


@contextmanager
def features_changed(monkeypatch: pytest.MonkeyPatch, change: Callable[[int, torch.Tensor], None]) -> Iterator[None]:
    """Let the target's layer outputs be changed in the n-th capture of the training."""
    capture, count = HookedTarget.capture, 0

    def changed(self: HookedTarget, ids: torch.Tensor, sink: Callable[[int, torch.Tensor], None]) -> None:
        nonlocal count
        count += 1
        number = count

        def through(position: int, hidden: torch.Tensor) -> None:
            hidden = hidden.clone()
            change(number, hidden)
            sink(position, hidden)

        capture(self, ids, through)

    with monkeypatch.context() as patch:
        patch.setattr(HookedTarget, "capture", changed)
        yield


def test_one_bad_row_is_skipped_counted_and_leaves_finite_weights(
    make_recipe: Callable[..., Recipe], frozen: TrainingSet, s3: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def poison(number: int, hidden: torch.Tensor) -> None:
        if number == 3:
            hidden[1, 4] = math.nan

    with features_changed(monkeypatch, poison):
        checkpoint, seen = trained(make_recipe(max_steps=6), frozen)
    assert (checkpoint.skipped_rows, checkpoint.skipped_steps) == (1, 0)
    assert [m.bad_rows for m in seen] == [0, 0, 1, 0, 0, 0]
    assert all(m.loss is not None and math.isfinite(m.loss) for m in seen)
    assert sum(file.rows for file in checkpoint.coverage) == sum(m.rows for m in seen)


def test_too_many_bad_rows_end_the_run(
    make_recipe: Callable[..., Recipe], frozen: TrainingSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    def poison(number: int, hidden: torch.Tensor) -> None:
        hidden[:2] = math.inf

    with (
        features_changed(monkeypatch, poison),
        pytest.raises(UserError, match=r"rows up to step \d+ were left out because the target gave NaN"),
    ):
        trained(make_recipe(epochs=9), frozen)


def test_steps_that_are_not_finite_end_the_run_when_they_come_in_a_row(
    make_recipe: Callable[..., Recipe], frozen: TrainingSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    update, calls = Learner.update, 0

    def spoiled(bad: set[int]) -> Callable[..., Any]:
        def wrapper(self: Learner, rate: float, stop: bool) -> Any:
            nonlocal calls
            calls += 1
            if calls in bad:
                self._flat[0] = math.nan
            return update(self, rate, stop)

        return wrapper

    monkeypatch.setattr(Learner, "update", spoiled({2, 3, 5, 6, 8}))
    checkpoint, seen = trained(make_recipe(max_steps=9, skips_before_stop=3), frozen)
    assert checkpoint.skipped_steps == 5
    assert [m.step for m in seen if m.skipped] == [2, 3, 5, 6, 8]
    assert all((m.loss is None) == m.skipped for m in seen)
    calls = 0
    monkeypatch.setattr(Learner, "update", spoiled({4, 5, 6}))
    with pytest.raises(UserError, match="the last 3 steps up to step 6 had no finite loss"):
        trained(make_recipe(max_steps=10, skips_before_stop=3), frozen)


@pytest.mark.parametrize("accumulation", [1, 3])
def test_a_device_never_has_more_than_a_micro_batch_beyond_an_outcome_that_was_not_read(
    make_recipe: Callable[..., Recipe],
    frozen: TrainingSet,
    accumulation: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """None would leave it without work; more would fill its queue, and a full one holds the host forever."""
    accumulate, update, read = Learner.accumulate, Learner.update, Outcome.read
    told: list[str] = []

    def tell(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def told_of(*arguments: Any) -> Any:
            told.append(name)
            return call(*arguments)

        return told_of

    monkeypatch.setattr(Learner, "accumulate", tell("micro-batch", accumulate))
    monkeypatch.setattr(Learner, "update", tell("update", update))
    monkeypatch.setattr(Outcome, "read", tell("read", read))
    every = {"validate_every_steps": 9, "checkpoint_every_steps": 9}
    trained(make_recipe(max_steps=4, batch_rows=2, accumulation=accumulation, **every), frozen)
    reads = [i for i, name in enumerate(told) if name == "read"]
    for number, at in enumerate(reads[:3]):
        made = [i for i, name in enumerate(told) if name == "update"][number]
        assert told[made:at].count("micro-batch") == 1, told


def test_validation_comes_when_asked_and_at_the_end(make_recipe: Callable[..., Recipe], frozen: TrainingSet) -> None:
    checkpoint, seen = trained(make_recipe(max_steps=8, validate_every_steps=3, held_out_share=0.3), frozen)
    assert [m.step for m in seen if m.held_out_loss is not None] == [3, 6, 8]
    assert checkpoint.held_out_accepted_prefix == seen[-1].held_out_accepted_prefix
    assert checkpoint.held_out_accepted_prefix >= 1.0


def test_no_held_out_rows_is_no_trouble_but_nothing_else_is(
    make_recipe: Callable[..., Recipe], frozen: TrainingSet
) -> None:
    _, seen = trained(make_recipe(max_steps=2, held_out_share=0.0), frozen)
    assert all(m.held_out_loss is None for m in seen)
    with pytest.raises(UserError, match="all 40 rows of the training set are held out"):
        trained(make_recipe(held_out_share=1.0), frozen)


def test_a_warm_start_continues_where_the_other_drafter_was(
    make_recipe: Callable[..., Recipe], frozen: TrainingSet, s3: Store, tmp_path: Path
) -> None:
    first, seen = trained(make_recipe(epochs=8, learning_rate=1e-2), frozen)
    exported = tmp_path / "exported"
    exported.mkdir()
    for stored in (first.weights, first.config):
        (exported / Path(stored.key).name).write_bytes(s3.read(stored))
    recipe = make_recipe(max_steps=1, learning_rate=1e-2)
    warm = recipe.model_copy(update={"drafter": recipe.drafter.model_copy(update={"warm_start": exported})})
    _, (step,) = trained(warm, frozen)
    assert step.loss is not None
    assert seen[0].loss is not None
    assert step.loss < 0.8 * seen[0].loss
    narrow = recipe.drafter.model_copy(update={"warm_start": exported, "block_size": 8})
    with pytest.raises(IncompatibleError, match="block_size = 4, the recipe's drafter 8"):
        trained(recipe.model_copy(update={"drafter": narrow}), frozen)


def test_masters_and_moments_are_fp32_whatever_the_target_is(make_recipe: Callable[..., Recipe]) -> None:
    """A norm that is stored in bfloat16 stays at 1.0: its steps are smaller than half its last bit."""
    recipe = make_recipe()
    recipe = recipe.model_copy(update={"target": recipe.target.model_copy(update={"dtype": "bfloat16"})})
    config = drafter_config(recipe, read_target_config(recipe.target.path), None)
    learner = make_learner(recipe, config, torch.device("cpu"), files=1)
    assert {tensor.dtype for kind in learner.state() for tensor in kind.values()} == {torch.float32}
    norm = learner.drafter.norm.weight
    norm.grad = torch.ones_like(norm)
    learner.optimizer.param_groups[0]["lr"] = 1e-4
    learner.optimizer.step()
    assert norm.detach().ne(1).all()


def test_switches_of_the_recipe_reach_the_drafter(make_recipe: Callable[..., Recipe], frozen: TrainingSet) -> None:
    """Gradient checkpointing changes no bit; a sliding window is another network."""
    plain, checkpointed = make_recipe(max_steps=3), make_recipe(max_steps=3, gradient_checkpointing=True)
    window = {"sliding_layers": 1, "sliding_window": 5}
    sliding = plain.model_copy(update={"drafter": plain.drafter.model_copy(update=window)})
    recipes = {"plain": plain, "checkpointed": checkpointed, "sliding": sliding}
    weights = {
        name: trained(recipe.model_copy(update={"name": name}), frozen)[0].weights.sha256
        for name, recipe in recipes.items()
    }
    assert weights["plain"] == weights["checkpointed"] != weights["sliding"]


def test_ids_beyond_the_target_are_refused(make_recipe: Callable[..., Recipe], s3: Store) -> None:
    rows = random_rows(0, 8)
    rows[3][1][5] = 97
    with pytest.raises(IncompatibleError, match=r"holds token id 97, but the target .* has 97 tokens"):
        trained(make_recipe(max_steps=1), put_training_set(s3, {"file0": rows}))


def test_rows_of_another_tokenization_are_refused_with_both_fingerprints(
    make_recipe: Callable[..., Recipe], s3: Store
) -> None:
    other = put_training_set(s3, {"file0": random_rows(0, 8)}, fingerprint_of_set="feedfacefeedface")
    with pytest.raises(IncompatibleError, match="under fingerprint feedfacefeedface, the recipe's tokenizer"):
        trained(make_recipe(max_steps=1), other)


def test_the_published_weights_are_a_drafter_folder(
    make_recipe: Callable[..., Recipe], frozen: TrainingSet, s3: Store, tmp_path: Path
) -> None:
    checkpoint, _ = trained(make_recipe(max_steps=2), frozen)
    for stored in (checkpoint.weights, checkpoint.config):
        (tmp_path / Path(stored.key).name).write_bytes(s3.read(stored))
    drafter = load_drafter(tmp_path)
    assert {p.dtype for p in drafter.parameters()} == {torch.float32}
    again = tmp_path / "again"
    again.mkdir()
    save_drafter(again, drafter.config, drafter.state_dict(), torch.float32)


def test_a_store_that_refuses_checkpoints_does_not_end_the_run(
    make_recipe: Callable[..., Recipe],
    frozen: TrainingSet,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What is on this disk suffices to continue on this machine."""
    upload = Store.upload

    def refuse(store: Store, key: str, path: Path) -> StoredObject:
        if "/checkpoints/" in key:
            raise StorageError(f"writing {key}: refused")
        return upload(store, key, path)

    monkeypatch.setattr(Store, "upload", refuse)
    checkpoint, _ = trained(make_recipe(max_steps=4), frozen)
    assert checkpoint.steps == 4
    assert "is on this disk only" in caplog.text
