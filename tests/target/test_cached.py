"""The target with a cache: what is known without its weights, and the text part of a vision-language checkpoint."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from dflash_core.errors import RecipeError
from dflash_core.target.cached import load_cached_target, named_stop_tokens
from tests.target.conftest import FAMILIES

LAYER_IDS = (0, 2)


@pytest.mark.parametrize("named", [None, 3, [3, 5]])
def test_stop_tokens_are_known_without_the_weights(target_folder: Path, tmp_path: Path, named: object) -> None:
    folder = tmp_path / "target"
    shutil.copytree(target_folder, folder)
    table = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(table | {"eos_token_id": 7}))
    (folder / "generation_config.json").unlink(missing_ok=True)
    if named is not None:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": named}))
    loaded = load_cached_target(folder, (1,), torch.float32, torch.device("cpu")).stop_tokens
    assert named_stop_tokens(folder) == loaded == {7, *(named if isinstance(named, list) else [named or 7])}
    (folder / "generation_config.json").write_text("{")
    with pytest.raises(RecipeError, match=r"target: its generation_config\.json cannot be used"):
        named_stop_tokens(folder)


def test_a_target_with_absent_weights_is_refused(target_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((target_folder / "config.json").read_bytes())
    tensors = load_file(target_folder / "model.safetensors")
    tensors.pop("model.layers.4.mlp.up_proj.weight")
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(RecipeError, match=r"1 weights are absent .*layers\.4\.mlp\.up_proj"):
        load_cached_target(tmp_path, (1,), torch.float32, torch.device("cpu"))


@pytest.fixture
def vision(tmp_path: Path) -> tuple[PreTrainedModel, Path]:
    """A whole vision-language model, as the published targets are, and its folder."""
    torch.manual_seed(1)
    model = FAMILIES["qwen3_5_vision"]().eval()
    folder = tmp_path / "vision"
    model.save_pretrained(folder)
    return model, folder


def test_a_vision_language_checkpoint_is_verified_by_its_text_part(vision: tuple[PreTrainedModel, Path]) -> None:
    model, folder = vision
    target = load_cached_target(folder, LAYER_IDS, torch.float32, torch.device("cpu"))
    assert named_stop_tokens(folder) == target.stop_tokens
    prompt = torch.randint(0, 97, (1, 21))
    logits, features = target.admit(prompt)
    with torch.no_grad():
        whole = model(input_ids=prompt, output_hidden_states=True)
    torch.testing.assert_close(logits, whole.logits[0, -1])
    torch.testing.assert_close(features, torch.cat([whole.hidden_states[layer + 1] for layer in LAYER_IDS], -1))
