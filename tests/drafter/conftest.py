"""Tiny random drafters in float64, so that equality means equality."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from dflash_core.drafter.config import DrafterConfig
from dflash_core.drafter.model import Drafter
from dflash_core.drafter.visibility import Blocks

torch.set_num_threads(1)


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
