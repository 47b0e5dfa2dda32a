"""The model card's serving commands fit the drafter's layers."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from dflash_core.drafter import card
from dflash_core.drafter.config import DrafterConfig, LayerType
from dflash_core.recipe import Recipe


@pytest.mark.parametrize(
    ("kinds", "begins"),
    [("FF", "vllm serve TARGET"), ("SS", "vllm serve TARGET"), ("SF", "VLLM_USE_V2_MODEL_RUNNER=1 vllm serve TARGET")],
)
def test_vllm_gets_the_runner_that_mixed_layers_need(
    config: DrafterConfig, make_recipe: Callable[..., Recipe], kinds: str, begins: str
) -> None:
    names: dict[str, LayerType] = {"F": "full_attention", "S": "sliding_attention"}
    layers = replace(config, layer_types=tuple(names[kind] for kind in kinds), sliding_window=6)
    text = card._serving(layers, make_recipe())
    assert f"\n{begins} --speculative-config " in text
    assert '"num_speculative_tokens": 3}' in text
