"""The model card's serving commands fit the drafter's layers."""

from dataclasses import replace

import pytest

from dflash_core.drafter.config import DrafterConfig, LayerType
from dflash_core.drafter.model import Drafter
from dflash_core.drafter.runs import find_checkpoint
from dflash_core.export.card import Provenance, model_card
from dflash_core.recipe import Recipe
from dflash_core.storage.s3 import Store
from dflash_core.training_set.freeze import load_statistics, load_training_set


@pytest.mark.parametrize(
    ("kinds", "begins"),
    [("FF", "vllm serve TARGET"), ("SS", "vllm serve TARGET"), ("SF", "VLLM_USE_V2_MODEL_RUNNER=1 vllm serve TARGET")],
)
def test_vllm_gets_the_runner_that_mixed_layers_need(
    config: DrafterConfig, finished: tuple[Recipe, Drafter], s3: Store, kinds: str, begins: str
) -> None:
    names: dict[str, LayerType] = {"F": "full_attention", "S": "sliding_attention"}
    layers = replace(config, layer_types=tuple(names[kind] for kind in kinds), sliding_window=6)
    checkpoint, training_set = find_checkpoint(s3, None), load_training_set(s3, None)
    statistics = load_statistics(s3, training_set)
    text = model_card(layers, Provenance(finished[0], checkpoint, training_set, statistics, None, None))
    assert f"\n{begins} --speculative-config " in text
    assert '"num_speculative_tokens": 3}' in text
