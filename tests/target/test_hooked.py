"""The truncated target gives the features of the whole one, exactly, for every family."""

import importlib.util
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from dflash_core.errors import IncompatibleError, RecipeError
from dflash_core.target.hooked import load_target, warn_of_slow_layers
from tests.target.conftest import COMMON
from tests.waits import Waits

CPU = torch.device("cpu")
LAYERS = (0, 2, 4)


def whole_features(model: PreTrainedModel, ids: torch.Tensor, layers: tuple[int, ...] = LAYERS) -> torch.Tensor:
    with torch.no_grad():
        hidden = model(input_ids=ids, output_hidden_states=True, use_cache=False).hidden_states
    return torch.cat([hidden[layer + 1] for layer in layers], dim=-1)


def test_features_equal_the_whole_models_hidden_states(family: tuple[PreTrainedModel, Path]) -> None:
    model, folder = family
    target = load_target(folder, LAYERS, torch.float32, CPU)
    ids = torch.randint(0, 97, (3, 75))
    features = target.features(ids)
    assert torch.equal(features, whole_features(model, ids))
    assert not torch.allclose(features[..., :32], whole_features(model, ids, (1,)))  # one layer off is not the same
    assert len(target.backbone.get_submodule("layers")) == LAYERS[-1] + 1  # type: ignore[arg-type]
    assert not any(p.requires_grad for p in target.backbone.parameters())


def test_a_pass_never_waits_for_the_device(family: tuple[PreTrainedModel, Path]) -> None:
    model, folder = family
    target = load_target(folder, LAYERS, torch.float32, CPU)
    ids = torch.randint(0, 97, (2, 40))
    with Waits() as waits:
        target.features(ids)
    assert waits.seen == []
    with Waits() as waits, torch.no_grad():
        model(input_ids=ids, use_cache=False)
    assert waits.seen, "transformers alone waits: else there is nothing left to spare it"


def test_padding_on_the_right_changes_no_token_before_it(family: tuple[PreTrainedModel, Path]) -> None:
    _, folder = family
    target = load_target(folder, LAYERS, torch.float32, CPU)
    ids = torch.randint(0, 97, (3, 75))
    lengths = (75, 33, 70)
    padded = ids * (torch.arange(75) < torch.tensor(lengths)[:, None])
    batch = target.features(padded)
    for row, length in enumerate(lengths):
        alone = target.features(ids[row : row + 1, :length])
        torch.testing.assert_close(batch[row, :length], alone[0], rtol=1e-4, atol=1e-5)


def test_a_document_never_sees_its_neighbour_in_the_batch(family: tuple[PreTrainedModel, Path]) -> None:
    """One document a row: whatever document 1 says, document 2 has the same features. Packed it would not."""
    _, folder = family
    target = load_target(folder, LAYERS, torch.float32, CPU)
    ids = torch.randint(0, 97, (2, 40))
    other = torch.stack(((ids[0] + 1) % 97, ids[1]))
    assert torch.equal(target.features(ids)[1], target.features(other)[1])
    packed, packed_other = target.features(ids.reshape(1, -1)), target.features(other.reshape(1, -1))
    assert not torch.allclose(packed[0, 40:], packed_other[0, 40:])


def test_the_last_layer_can_be_captured(family: tuple[PreTrainedModel, Path]) -> None:
    """Its entry in hidden_states is normed already, so the hook is compared with the layer itself."""
    model, folder = family
    ids = torch.randint(0, 97, (1, 21))
    outputs: list[torch.Tensor] = []
    inner = model.get_decoder()
    hook = inner.layers[-1].register_forward_hook(
        lambda _m, _i, out: outputs.append(out[0] if isinstance(out, tuple) else out)
    )
    normed = whole_features(model, ids, (5,))
    hook.remove()
    features = load_target(folder, (5,), torch.float32, CPU).features(ids)
    assert torch.equal(features, outputs[0])
    assert not torch.allclose(features, normed)


def copy(folder: Path, to: Path) -> Path:
    shutil.copytree(folder, to)
    return to


@pytest.mark.parametrize("installed", [set(), {"fla"}, {"fla", "causal_conv1d"}], ids=["none", "one", "both"])
def test_linear_attention_without_its_kernels_is_told_on_a_gpu_alone(
    family: tuple[PreTrainedModel, Path],
    installed: set[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, folder = family
    target = load_target(folder, LAYERS, torch.float32, CPU)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name in installed else None)
    warn_of_slow_layers(target, "cpu")
    assert caplog.text == ""
    warn_of_slow_layers(target, "cuda")
    if "qwen3_5" not in model.config.model_type or len(installed) == 2:
        assert caplog.text == ""
    else:
        assert "4 of the target's 5 layers are linear attention" in caplog.text
        assert "causal-conv1d; install what the extra gpu names" in caplog.text
        assert ("flash-linear-attention" in caplog.text) == ("fla" not in installed)


def test_unusable_folders_are_refused_with_what_is_wrong(target_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"is not a model folder"):
        load_target(tmp_path / "nowhere", (1,), torch.float32, CPU)
    bare = copy(target_folder, tmp_path / "bare")
    (bare / "model.safetensors").rename(bare / "pytorch_model.bin")
    with pytest.raises(RecipeError, match=r"no \*\.safetensors"):
        load_target(bare, (1,), torch.float32, CPU)
    with pytest.raises(IncompatibleError, match="layer 9 does not exist"):
        load_target(target_folder, (1, 9), torch.float32, CPU)
    lacking = copy(target_folder, tmp_path / "lacking")
    weights = load_file(lacking / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, lacking / "model.safetensors", {"format": "pt"})
    with pytest.raises(RecipeError, match=r"layers\.1\.mlp\.up_proj"):
        load_target(lacking, (1,), torch.float32, CPU)
    damaged = copy(target_folder, tmp_path / "damaged")
    (damaged / "model.safetensors").write_bytes((damaged / "model.safetensors").read_bytes()[:-100])
    with pytest.raises(RecipeError):
        load_target(damaged, (1,), torch.float32, CPU)


def test_an_index_that_names_a_missing_file_is_refused(tmp_path: Path) -> None:
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**COMMON, head_dim=16)).save_pretrained(tmp_path, max_shard_size="20KB")
    sorted(tmp_path.glob("*.safetensors"))[0].unlink()
    with pytest.raises(RecipeError, match="lacks 1 of"):
        load_target(tmp_path, (1,), torch.float32, CPU)


def test_code_in_the_folder_is_never_run(target_folder: Path, tmp_path: Path) -> None:
    folder = copy(target_folder, tmp_path / "hostile")
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "hostile", "auto_map": {"AutoConfig": "evil.Config", "AutoModel": "evil.Model"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'canary')!r}, 'w')")
    with pytest.raises(RecipeError):
        load_target(folder, (1,), torch.float32, CPU)
    assert not (tmp_path / "canary").exists()
