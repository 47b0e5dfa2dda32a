"""A training starts from exactly the weights of a folder, and only from a folder that is whole and fits."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load

from dflash_core.drafter.config import drafter_config, read_target_config
from dflash_core.drafter.export import export_drafter
from dflash_core.errors import IncompatibleError
from dflash_core.recipe import Recipe
from dflash_core.storage.store import Store
from dflash_core.training.run import train_drafter
from dflash_core.training.setup import make_learner
from tests.training.conftest import put_training_set, random_rows


def test_a_warm_start_from_an_export_is_bit_equal_and_must_be_whole_and_of_this_tokenizer(
    make_recipe: Callable[..., Recipe], s3: Store, tmp_path: Path
) -> None:
    frozen = put_training_set(s3, {"file0": random_rows(0, 20)})
    first = train_drafter(make_recipe(max_steps=1), frozen.hash, False, lambda _: None)
    masters = load(s3.read(first.weights))
    for dtype in ("float32", "bfloat16"):
        folder = tmp_path / dtype
        recipe = make_recipe(max_steps=1)
        exported = recipe.export.model_copy(update={"local_dir": folder, "dtype": dtype})
        export_drafter(recipe.model_copy(update={"export": exported}), first.run)
        warm = recipe.model_copy(update={"drafter": recipe.drafter.model_copy(update={"warm_start": folder})})
        config = drafter_config(warm, read_target_config(warm.target.path), None)
        started, _ = make_learner(warm, config, torch.device("cpu"), 1).state()
        for name, master in masters.items():
            assert started[name].dtype == torch.float32
            assert torch.equal(started[name], master.to(getattr(torch, dtype)).float())
    other = tmp_path / "tokenizer"
    shutil.copytree(warm.target.path, other)
    (other / "tokenizer.json").write_text((other / "tokenizer.json").read_text().replace("w95", "w95x"))
    elsewhere = warm.model_copy(update={"tokenization": warm.tokenization.model_copy(update={"tokenizer": other})})
    with pytest.raises(IncompatibleError, match=r"warm_start .* tokenizer\.json of sha256 \w{12}, .* has \w{12}"):
        make_learner(elsewhere, config, torch.device("cpu"), 1)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\0")
    with pytest.raises(IncompatibleError, match=r"its manifest says .* it was damaged or changed"):
        make_learner(warm, config, torch.device("cpu"), 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 48}, "hidden_size = 48, the recipe's drafter 32"),
        ({"vocab_size": 128}, "vocab_size = 128, the recipe's drafter 97"),
        (
            {"dflash_config": {"mask_token_id": 95, "target_layer_ids": [1, 3]}},
            "mask_token_id = 95, the recipe's drafter 96",
        ),
        (
            {"dflash_config": {"mask_token_id": 96, "target_layer_ids": [0, 3]}},
            r"target_layer_ids = \(0, 3\), the recipe's drafter \(1, 3\)",
        ),
        (
            {"dflash_config": {"mask_token_id": 96, "target_layer_ids": [1, 9]}},
            r"target_layer_ids \[1, 9\] must ascend within the target's layers 0\.\.4",
        ),
        ({"dflash_config": {"mask_token_id": 97, "target_layer_ids": [1, 3]}}, "97 is no row .* which has 97"),
    ],
)
def test_a_warm_start_of_another_network_is_refused_with_both_values(
    make_recipe: Callable[..., Recipe], tmp_path: Path, change: dict[str, object], message: str
) -> None:
    recipe = make_recipe(max_steps=1)
    config = drafter_config(recipe, read_target_config(recipe.target.path), None)
    (tmp_path / "config.json").write_text(json.dumps(config.to_json() | change))
    warm = recipe.model_copy(update={"drafter": recipe.drafter.model_copy(update={"warm_start": tmp_path})})
    with pytest.raises(IncompatibleError, match=message):
        make_learner(warm, config, torch.device("cpu"), 1)


def test_a_warm_start_folder_that_is_not_there_or_lacks_a_file_is_named(
    make_recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    recipe = make_recipe(max_steps=1)
    config = drafter_config(recipe, read_target_config(recipe.target.path), None)
    warm = recipe.model_copy(update={"drafter": recipe.drafter.model_copy(update={"warm_start": tmp_path / "nowhere"})})
    with pytest.raises(IncompatibleError, match=r"nowhere/config\.json cannot be read"):
        make_learner(warm, config, torch.device("cpu"), 1)
    (tmp_path / "nowhere").mkdir()
    (tmp_path / "nowhere" / "config.json").write_text(json.dumps(config.to_json()))
    with pytest.raises(IncompatibleError, match=r"nowhere/model\.safetensors cannot be read"):
        make_learner(warm, config, torch.device("cpu"), 1)
