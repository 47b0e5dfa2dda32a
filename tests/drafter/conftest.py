"""Tiny random drafters in float64, so that equality means equality."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dflash_core.drafter.attention import Blocks
from dflash_core.drafter.config import DrafterConfig, drafter_config
from dflash_core.drafter.folder import save_drafter
from dflash_core.drafter.model import Drafter
from dflash_core.recipe import Recipe
from dflash_core.records import DrafterCheckpoint, RunPointer
from dflash_core.storage.layout import CONFIG_FILE, LATEST_RUN, WEIGHTS_FILE, RunKeys
from dflash_core.storage.s3 import Store
from dflash_core.target.files import read_target_config, target_fingerprint, tokenizer_sha256
from tests.training.conftest import make_recipe, put_training_set, random_rows, target_folder

torch.set_num_threads(1)
__all__ = ["make_recipe", "target_folder"]
RUN = "tiny-0123456789ab"


@pytest.fixture
def config() -> DrafterConfig:
    """Two full-attention layers over two captured layers of a target with six; block size 4."""
    return DrafterConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=24,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_hidden_layers=2,
        block_size=4,
        mask_token_id=49,
        target_layer_ids=(1, 3),
        num_target_layers=6,
        layer_types=("full_attention", "full_attention"),
        rope_theta=10_000.0,
    )


@pytest.fixture(params=["full", "sliding"])
def any_config(request: pytest.FixtureRequest, config: DrafterConfig) -> DrafterConfig:
    """The same with and without a sliding first layer, whose window of 6 ends inside the context."""
    if request.param == "full":
        return config
    return replace(config, layer_types=("sliding_attention", "full_attention"), sliding_window=6)


@pytest.fixture
def make_drafter() -> Callable[[DrafterConfig], Drafter]:
    """A drafter with weights large enough that everything matters."""

    def make(config: DrafterConfig) -> Drafter:
        drafter = Drafter(config).double()
        drafter.initialize(1, gain=1.5)
        with torch.no_grad():
            for name, parameter in drafter.named_parameters():
                if name.endswith("norm.weight"):
                    parameter.add_(torch.linspace(-0.3, 0.3, parameter.numel()))
        return drafter

    return make


@pytest.fixture
def make_blocks() -> Callable[..., Blocks]:
    """Blocks of rows that are one document each; anchors of None are padding blocks."""

    def make(rows: list[list[int | None]], length: int) -> Blocks:
        anchor = torch.tensor([[0 if a is None else a for a in row] for row in rows])
        valid = torch.tensor([[a is not None for a in row] for row in rows])
        return Blocks(anchor, torch.zeros_like(anchor), torch.where(valid, length, 0), valid)

    return make


@pytest.fixture
def finished(s3: Store, make_recipe: Callable[..., Recipe], tmp_path: Path) -> tuple[Recipe, Drafter]:
    """A recipe and the drafter of its finished run `RUN`, as training would have stored it."""
    recipe = make_recipe()
    training_set = put_training_set(s3, {"file0": random_rows(0, 8)})
    drafter = Drafter(drafter_config(recipe, read_target_config(recipe.target.path), None))
    drafter.initialize(3)
    folder = tmp_path / "masters"
    folder.mkdir()
    save_drafter(folder, drafter.config, drafter.state_dict(), torch.float32)
    keys = RunKeys(RUN)
    checkpoint = DrafterCheckpoint(
        run=RUN,
        recipe=recipe.name,
        code_version="1",
        training_set=training_set.hash,
        gate="passed",
        target_fingerprint=target_fingerprint(recipe.target.path),
        tokenizer_sha256=tokenizer_sha256(recipe),
        steps=1,
        train_s=1.0,
        final_loss=1.0,
        held_out_accepted_prefix=1.5,
        weights=s3.upload(keys.weights, folder / WEIGHTS_FILE),
        config=s3.upload(keys.config, folder / CONFIG_FILE),
        metrics=s3.put(keys.metrics, b""),
        coverage=(),
        skipped_steps=0,
        skipped_rows=0,
    )
    s3.put_record(keys.manifest, checkpoint)
    s3.put_record(LATEST_RUN, RunPointer(run=RUN))
    return recipe, drafter
