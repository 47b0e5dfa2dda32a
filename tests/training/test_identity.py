"""Who a run is: what changes its weights names it, and nothing starts next to an unfinished run that others began."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dflash_core.errors import IncompatibleError, TrainingStopped
from dflash_core.recipe import Recipe
from dflash_core.storage.s3 import Store
from dflash_core.target.files import target_fingerprint
from dflash_core.training.identity import run_name
from tests.training.conftest import World, flip, put_training_set, random_rows


def test_the_run_is_named_by_what_changes_its_weights(
    make_recipe: Callable[..., Recipe], s3: Store, target_folder: Path
) -> None:
    frozen = put_training_set(s3, {"file0": random_rows(0, 20), "file1": random_rows(1, 20)})
    fingerprint = target_fingerprint(target_folder)
    recipe = make_recipe()
    name = run_name(recipe, frozen, fingerprint)
    assert name.startswith("tiny-")
    for other in (
        make_recipe(checkpoint_every_steps=50),
        make_recipe(validate_every_steps=50),
        make_recipe(keep_checkpoints=5),
        make_recipe(batch_rows=2, accumulation=2),
        make_recipe(batch_rows=2, placement={"targets": ["cpu", "cpu"], "drafters": ["cpu", "cpu"]}),
        recipe.model_copy(update={"storage": recipe.storage.model_copy(update={"work_dir": Path("elsewhere")})}),
    ):
        assert run_name(other, frozen, fingerprint) == name
    others = [
        run_name(other, frozen, fingerprint)
        for other in (
            make_recipe(learning_rate=1e-4),
            make_recipe(batch_rows=8),
            make_recipe(max_steps=3),
            make_recipe(anchors=4),
            recipe.model_copy(update={"seed": 1}),
            recipe.model_copy(update={"drafter": recipe.drafter.model_copy(update={"num_layers": 2})}),
            recipe.model_copy(update={"target": recipe.target.model_copy(update={"layer_ids": (1, 2)})}),
        )
    ]
    others.append(run_name(recipe, frozen, "f" * 64))
    others.append(run_name(recipe, frozen.model_copy(update={"hash": "0"}), fingerprint))
    assert len({name, *others}) == len(others) + 1


Change = Callable[[World], World]


def with_training(**settings: Any) -> Change:
    def change(world: World) -> World:
        training = world.recipe.training.model_copy(update=settings)
        return replace(world, recipe=world.recipe.model_copy(update={"training": training}))

    return change


def with_touched_weights(world: World) -> World:
    folder = world.recipe.target.path.with_name(f"{world.recipe.storage.work_dir.name}-target")
    if not folder.exists():
        shutil.copytree(world.recipe.target.path, folder)
        flip(folder / "model.safetensors")
    target = world.recipe.target.model_copy(update={"path": folder})
    return replace(world, recipe=world.recipe.model_copy(update={"target": target}))


@pytest.mark.parametrize(
    ("change", "fields", "place"),
    [
        (with_training(gamma=9.0, clip=2.0), "training.clip = 1.0 (now 2.0), training.gamma = 4.0 (now 9.0)", "disk"),
        (with_training(learning_rate=1e-3), "training.learning_rate = 0.002 (now 0.001)", "store"),
        (with_touched_weights, "target and tokenizer = ", "disk"),
    ],
    ids=["two fields", "learning rate", "target"],
)
def test_another_recipe_next_to_an_unfinished_run_is_refused_with_the_fields(
    make_world: Callable[..., World], change: Change, fields: str, place: str
) -> None:
    """Else it would start at step 0 without a word, and the days that the run took would be forgotten."""
    world = make_world("unfinished")
    world.stop(3)
    run = world.run_folder.name
    if place == "store":
        shutil.rmtree(world.recipe.storage.work_dir)
    other = change(world)
    with pytest.raises(IncompatibleError, match=rf"run {run} of recipe 'tiny' stopped at step \d+") as refusal:
        other.train_here()
    assert fields in str(refusal.value)
    renamed = replace(other, recipe=other.recipe.model_copy(update={"name": "other"}))
    with pytest.raises(TrainingStopped):
        renamed.train_here(1)
    assert world.train_here()[1][0].step > 3  # restored, it continues
    assert change(world).train_here()[0].steps == 6  # and once it is finished, others may start


def test_other_data_are_another_run(make_world: Callable[..., World]) -> None:
    world = make_world("data")
    world.stop(3)
    more = put_training_set(world.store, {"file0": random_rows(0, 20)})
    assert replace(world, frozen=more).train_here()[0].steps == 6
