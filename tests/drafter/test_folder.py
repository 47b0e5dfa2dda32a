"""A drafter folder holds exactly the published files, comes back bit for bit, and anything else is refused by name."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_core.drafter.config import DrafterConfig
from dflash_core.drafter.folder import load_drafter, save_drafter, tensor_shapes
from dflash_core.drafter.model import Drafter
from dflash_core.errors import IncompatibleError


@pytest.fixture
def drafter(any_config: DrafterConfig) -> Drafter:
    made = Drafter(any_config)
    made.initialize(0)
    return made


def test_fp32_comes_back_bit_for_bit(drafter: Drafter, tmp_path: Path) -> None:
    files = save_drafter(tmp_path, drafter.config, drafter.state_dict(), torch.float32)
    assert [f.name for f in files] == ["config.json", "model.safetensors"]
    again = load_drafter(tmp_path)
    assert again.config == drafter.config
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor)


def test_bfloat16_is_written_and_said(drafter: Drafter, tmp_path: Path) -> None:
    save_drafter(tmp_path, drafter.config, drafter.state_dict(), torch.bfloat16)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    stored = load_file(tmp_path / "model.safetensors")
    assert stored.keys() == tensor_shapes(drafter.config).keys()
    assert all(torch.equal(tensor, drafter.state_dict()[name].bfloat16()) for name, tensor in stored.items())


def test_large_weights_are_split_with_an_index_and_come_back(drafter: Drafter, tmp_path: Path) -> None:
    files = save_drafter(tmp_path, drafter.config, drafter.state_dict(), torch.float32, shard_bytes=4000)
    shards = [f for f in files if f.suffix == ".safetensors"]
    assert len(shards) > 2
    assert shards[0].name == f"model-00001-of-{len(shards):05d}.safetensors"
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == drafter.state_dict().keys()
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in drafter.state_dict().values())
    again = load_drafter(tmp_path)
    assert all(torch.equal(again.state_dict()[n], t) for n, t in drafter.state_dict().items())


def test_missing_unexpected_and_misshapen_tensors_are_named(drafter: Drafter, tmp_path: Path) -> None:
    save_drafter(tmp_path, drafter.config, drafter.state_dict(), torch.float32)
    good = load_file(tmp_path / "model.safetensors")
    cases = {
        "lacks norm.weight": {n: t for n, t in good.items() if n != "norm.weight"},
        "unexpected lm_head.weight": good | {"lm_head.weight": torch.zeros(50, 16)},
        r"fc.weight of shape \[16, 48\] where config.json asks for \[16, 32\]": good
        | {"fc.weight": torch.zeros(16, 48)},
        "unexpected model.norm.weight": {n if n != "norm.weight" else "model." + n: t for n, t in good.items()},
    }
    for message, tensors in cases.items():
        save_file(tensors, tmp_path / "model.safetensors")
        with pytest.raises(IncompatibleError, match=message):
            load_drafter(tmp_path)
        with pytest.raises(IncompatibleError, match=message):
            save_drafter(tmp_path, drafter.config, tensors, torch.float32)


def test_damaged_absent_and_foreign_files_are_refused(drafter: Drafter, tmp_path: Path) -> None:
    with pytest.raises(IncompatibleError, match=r"config\.json cannot be read"):
        load_drafter(tmp_path)
    save_drafter(tmp_path, drafter.config, drafter.state_dict(), torch.float32)
    weights = tmp_path / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-8])
    with pytest.raises(IncompatibleError, match=r"model\.safetensors cannot be read"):
        load_drafter(tmp_path)
    weights.unlink()
    with pytest.raises(IncompatibleError, match=r"model\.safetensors"):
        load_drafter(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"norm.weight": "../x"}}))
    with pytest.raises(IncompatibleError, match=r"not a file of that folder"):
        load_drafter(tmp_path)
