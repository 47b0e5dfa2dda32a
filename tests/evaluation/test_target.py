"""The verifying target: what is known of it without its weights."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from dflash_core.evaluation.target import load_verifying_target, named_stop_tokens


@pytest.mark.parametrize("named", [None, 3, [3, 5]])
def test_stop_tokens_are_known_without_the_weights(target_folder: Path, tmp_path: Path, named: object) -> None:
    folder = tmp_path / "target"
    shutil.copytree(target_folder, folder)
    table = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(table | {"eos_token_id": 7}))
    (folder / "generation_config.json").unlink(missing_ok=True)
    if named is not None:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": named}))
    loaded = load_verifying_target(folder, (1,), torch.float32, torch.device("cpu")).stop_tokens
    assert named_stop_tokens(folder) == loaded == {7, *(named if isinstance(named, list) else [named or 7])}
