"""Tiny random targets of several families, and a drafter for them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from dflash_core.drafter.config import DrafterConfig
from dflash_core.drafter.model import Drafter
from dflash_core.target.cached import CachedTarget
from tests.training.conftest import make_recipe, target_folder

torch.set_num_threads(1)
__all__ = ["make_recipe", "target_folder"]

LAYER_IDS = (0, 2)
VOCABULARY = 64


@pytest.fixture
def make_target() -> Callable[[str, int], CachedTarget]:
    """A target with weights large enough that its greedy output is no short loop."""

    def make(family: str, vocabulary: int = VOCABULARY) -> CachedTarget:
        torch.manual_seed(0)
        shape: dict[str, Any] = {
            "vocab_size": vocabulary,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 512,
            "eos_token_id": None,
            "initializer_range": 0.2,
        }
        linear: dict[str, Any] = {
            "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
        }
        if family == "llama":
            return CachedTarget(LlamaForCausalLM(LlamaConfig(**shape)), LAYER_IDS)
        if family == "qwen2":
            return CachedTarget(Qwen2ForCausalLM(Qwen2Config(**shape)), LAYER_IDS)
        if family == "sliding":
            return CachedTarget(MistralForCausalLM(MistralConfig(**shape, sliding_window=16)), LAYER_IDS)
        if family == "qwen3":
            return CachedTarget(Qwen3ForCausalLM(Qwen3Config(**shape)), LAYER_IDS)
        return CachedTarget(Qwen3_5ForCausalLM(Qwen3_5TextConfig(**shape, **linear)), LAYER_IDS)

    return make


@pytest.fixture
def drafter() -> Drafter:
    """A random drafter of block size 8 whose first layer has a window of 12."""
    config = DrafterConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_hidden_layers=2,
        block_size=8,
        mask_token_id=VOCABULARY - 1,
        target_layer_ids=LAYER_IDS,
        num_target_layers=4,
        layer_types=("sliding_attention", "full_attention"),
        sliding_window=12,
    )
    made = Drafter(config)
    made.initialize(0)
    return made
