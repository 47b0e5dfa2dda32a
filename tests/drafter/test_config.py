"""The config that is written is the published one, and what a recipe leaves open comes from the target, rightly."""

import json
from dataclasses import replace
from typing import Any

import pytest

from dflash_core.drafter.config import DrafterConfig, check_fit, drafter_config, layer_ids
from dflash_core.errors import IncompatibleError
from dflash_core.recipe import Recipe

PUBLISHED_KEYS = [
    *("architectures", "auto_map", "model_type", "attention_bias", "attention_dropout", "hidden_act", "rms_norm_eps"),
    *("dtype", "rope_theta", "rope_scaling", "bos_token_id", "eos_token_id", "pad_token_id", "vocab_size"),
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("max_position_embeddings", "tie_word_embeddings", "num_hidden_layers", "block_size", "num_target_layers"),
    *("dflash_config", "layer_types", "use_sliding_window", "sliding_window", "max_window_layers"),
]
QWEN3 = {
    "model_type": "qwen3",
    "vocab_size": 151_936,
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_hidden_layers": 36,
    "rope_theta": 1e6,
    "max_position_embeddings": 40_960,
    "tie_word_embeddings": False,
    "eos_token_id": 151_645,
}
QWEN36 = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "tie_word_embeddings": False,
    "text_config": {
        "model_type": "qwen3_5_text",
        "vocab_size": 248_320,
        "hidden_size": 5120,
        "intermediate_size": 17_408,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "num_hidden_layers": 64,
        "rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10]},
    },
}


def recipe(**drafter: Any) -> Recipe:
    return Recipe.model_validate(
        {
            "name": "r",
            "source": {"bucket": "b"},
            "storage": {"bucket": "derived"},
            "target": {"path": "t"},
            "drafter": drafter,
        }
    )


@pytest.mark.parametrize(
    ("layers", "count", "ids"),
    [
        (36, 5, (1, 9, 17, 25, 33)),
        (64, 5, (1, 16, 31, 46, 61)),
        (30, 3, (1, 14, 27)),
        (64, 1, (32,)),
        (24, 4, (1, 8, 14, 21)),  # rounded, up
        (30, 5, (1, 8, 14, 20, 27)),  # and of a half to the even one, as Python does in the reference
    ],
)
def test_default_layer_ids_are_the_published_ones(layers: int, count: int, ids: tuple[int, ...]) -> None:
    assert layer_ids(layers, count) == ids


def test_a_target_too_shallow_for_so_many_layers_is_refused() -> None:
    with pytest.raises(IncompatibleError, match=r"target of 6 layers has no 5 layers"):
        layer_ids(6, 5)


def test_json_round_trip_has_the_published_keys_in_order(any_config: DrafterConfig) -> None:
    table = any_config.to_json()
    assert list(table) == PUBLISHED_KEYS
    assert table["architectures"] == ["DFlashDraftModel"]
    assert table["use_sliding_window"] == (any_config.sliding_window is not None)
    assert DrafterConfig.from_json(json.loads(json.dumps(table))) == any_config


def test_newer_files_with_rope_parameters_and_harmless_keys_are_read(config: DrafterConfig) -> None:
    table = config.to_json() | {"use_cache": True, "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}}
    del table["rope_theta"]
    assert DrafterConfig.from_json(table) == config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_scaling": {"type": "yarn"}}, "rope_scaling"),
        ({"attention_bias": True}, "attention_bias"),
        ({"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "yarn"),
        ({"dflash_config": {"mask_token_id": 1}}, "target_layer_ids"),
        ({"dflash_config": {"mask_token_id": 50, "target_layer_ids": [1, 3]}}, "50"),
        ({"dflash_config": {"mask_token_id": 49, "target_layer_ids": [1, 6]}}, "6"),
    ],
)
def test_a_file_that_asks_for_another_network_is_refused(
    config: DrafterConfig, change: dict[str, object], message: str
) -> None:
    with pytest.raises(IncompatibleError, match=message):
        DrafterConfig.from_json(config.to_json() | change)


def test_open_fields_come_from_the_target() -> None:
    made = drafter_config(recipe(), QWEN3, None)
    assert (made.hidden_size, made.intermediate_size, made.vocab_size) == (4096, 12_288, 151_936)
    assert (made.num_attention_heads, made.num_key_value_heads, made.head_dim) == (32, 8, 128)
    assert (made.target_layer_ids, made.num_target_layers) == ((1, 9, 17, 25, 33), 36)
    assert (made.mask_token_id, made.block_size, made.rope_theta) == (151_669, 16, 1e6)


def test_rope_and_head_size_are_the_drafters_own_on_a_hybrid_vision_target() -> None:
    made = drafter_config(
        recipe(num_attention_heads=32, num_key_value_heads=8, sliding_window=2048, sliding_layers=4), QWEN36, None
    )
    assert made.head_dim == 128
    assert made.rope_theta == 1e7
    assert made.to_json()["rope_scaling"] is None
    assert made.layer_types == ("sliding_attention",) * 4 + ("full_attention",)
    assert (made.mask_token_id, made.target_layer_ids) == (248_070, (1, 16, 31, 46, 61))
    assert made.feature_size == 25_600


def test_mask_token_is_the_recipes_then_the_tokenizers_then_the_familys() -> None:
    assert drafter_config(recipe(mask_token_id=7), QWEN3, 8).mask_token_id == 7
    assert drafter_config(recipe(), QWEN3, 8).mask_token_id == 8
    with pytest.raises(IncompatibleError, match=r"drafter.mask_token_id"):
        drafter_config(recipe(), QWEN3 | {"model_type": "llama"}, None)
    with pytest.raises(IncompatibleError, match=r"drafter.mask_token_id"):
        drafter_config(recipe(), QWEN3 | {"vocab_size": 1024}, None)


def test_a_mask_token_without_embedding_row_is_refused_with_both_values() -> None:
    with pytest.raises(IncompatibleError, match=r"151936 is not a row .* has 151936"):
        drafter_config(recipe(mask_token_id=151_936), QWEN3, None)


def test_contradictions_between_recipe_and_target_hold_both_values() -> None:
    with pytest.raises(IncompatibleError, match=r"512 .* 4096"):
        drafter_config(recipe(hidden_size=512), QWEN3, None)
    with pytest.raises(IncompatibleError, match="sliding_window"):
        drafter_config(recipe(sliding_layers=2), QWEN3, None)
    made = drafter_config(recipe(), QWEN3, None)
    check_fit(made, QWEN3)
    for field, key in (
        ("hidden_size", "hidden_size"),
        ("vocab_size", "vocab_size"),
        ("num_target_layers", "num_hidden_layers"),
    ):
        value = int(str(QWEN3[key]))
        with pytest.raises(IncompatibleError, match=rf"{value + 40}.*{value}"):
            check_fit(replace(made, **{field: value + 40}), QWEN3)  # type: ignore[arg-type]
