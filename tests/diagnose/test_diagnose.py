"""A run and an exported folder are diagnosed from the store; what cannot be is one sentence with both values."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_core.cli import terminal
from dflash_core.diagnose.diagnose import Diagnosis, diagnose, other_heads
from dflash_core.drafter.runs import find_checkpoint
from dflash_core.errors import IncompatibleError, ObjectMissing
from dflash_core.export.export import export_drafter
from dflash_core.recipe import EvaluationSettings, ExportSettings, Recipe
from dflash_core.storage.s3 import Store
from dflash_core.training.job import Job
from dflash_core.training.train import train
from dflash_core.workspace import Workspace, connect
from tests.console import shown
from tests.training.conftest import MASK, put_training_set, random_rows

ROWS = {f"file{i}": random_rows(i, 20) for i in range(2)}


def nothing(*_: object) -> None:
    """No progress bar."""


@pytest.fixture
def workspace(make_recipe: Callable[..., Recipe], s3: Store, tmp_path: Path) -> Workspace:
    """One whose run is trained and exported to a folder."""
    put_training_set(s3, ROWS)
    recipe = make_recipe(max_steps=4, held_out_share=0.3).model_copy(
        update={
            "evaluation": EvaluationSettings(prompts=5, max_new_tokens=12),
            "export": ExportSettings(dtype="float32", local_dir=tmp_path / "drafter"),
        }
    )
    made = connect(recipe)
    train(made, Job(), nothing)
    export_drafter(made, None)
    return made


def change_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    table = json.loads(path.read_text())
    for key, value in changes.items():
        holder = table["dflash_config"] if key in table["dflash_config"] else table
        holder[key] = value
    path.write_text(json.dumps(table))


def test_a_run_and_its_export_are_diagnosed_alike(workspace: Workspace, s3: Store, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    of_run = diagnose(workspace, None, None, lambda done, total: seen.append((done, total)))
    assert seen == [(done, 5) for done in range(6)]
    checkpoint = find_checkpoint(s3, None)
    assert of_run.trained_prefix == checkpoint.held_out_accepted_prefix
    assert of_run.measured_prefix == pytest.approx(checkpoint.held_out_accepted_prefix, abs=0.3)
    assert len(of_run.findings) == 9
    assert Diagnosis.model_validate_json(of_run.model_dump_json()) == of_run
    of_folder = diagnose(workspace, None, tmp_path / "drafter", nothing)
    assert of_folder.drafter == str(tmp_path / "drafter")
    assert of_folder.notes == ()
    assert (of_folder.served, of_folder.measured_prefix) == (of_run.served, of_run.measured_prefix)
    text = shown(terminal.diagnosis(of_folder))
    for value in ("off-policy rows", "layer offset", of_folder.conclusion[:13]):
        assert value in text


def test_what_a_folder_no_longer_has_of_its_run_is_told(workspace: Workspace, s3: Store, tmp_path: Path) -> None:
    folder, run = tmp_path / "drafter", find_checkpoint(s3, None).run
    change_config(folder, mask_token_id=5, max_position_embeddings=7)
    tensors = load_file(folder / "model.safetensors")
    tensors["norm.weight"] += 1
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    found = diagnose(workspace, None, folder, nothing)
    assert found.notes == (
        f"config.json has mask_token_id = 5, run {run} was trained with {MASK}",
        f"1 of {len(tensors)} tensors differ from run {run}, first norm.weight",
    )
    (tried,) = [finding for finding in found.findings if finding.cause == "mask token"]
    assert tried.alternatives >= 1
    (folder / "manifest.json").unlink()
    assert diagnose(workspace, None, folder, nothing).trained_prefix is None


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"num_target_layers": 9}, "number of target layers 9, this target has 5"),
        ({"vocab_size": 200}, "vocabulary 200, this target has 97"),
        ({"mask_token_id": 97}, "mask_token_id 97 is not a row of the target's embedding, which has 97"),
        ({"target_layer_ids": [1, 5]}, r"target_layer_ids \[1, 5\] must ascend within the target's layers 0..4"),
        ({"head_dim": 32}, r"of shape \[32, 32\] where config.json asks for \[64, 32\]"),
    ],
)
def test_a_folder_that_does_not_fit_is_refused_with_both_values(
    workspace: Workspace, tmp_path: Path, changes: dict[str, object], sentence: str
) -> None:
    change_config(tmp_path / "drafter", **changes)
    with pytest.raises(IncompatibleError, match=sentence):
        diagnose(workspace, None, tmp_path / "drafter", nothing)


def test_a_head_in_the_files_of_a_target_that_says_it_is_tied_is_an_alternative(
    target_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_bytes((target_folder / "config.json").read_bytes())
    tensors = load_file(target_folder / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    save_file({**tensors, "lm_head.weight": embedding + 1}, tmp_path / "model.safetensors", {"format": "pt"})
    ((name, head),) = other_heads(tmp_path, embedding)
    assert name == "lm_head.weight of model.safetensors, though the config ties it"
    assert torch.equal(head, embedding + 1)
    assert other_heads(target_folder, embedding) == []


def test_what_is_not_there_is_named(workspace: Workspace, tmp_path: Path) -> None:
    with pytest.raises(ObjectMissing, match="no finished run 'r9'"):
        diagnose(workspace, "r9", None, nothing)
    with pytest.raises(IncompatibleError, match=r"nowhere/config\.json cannot be read"):
        diagnose(workspace, None, tmp_path / "nowhere", nothing)
    (tmp_path / "drafter" / "model.safetensors").unlink()
    with pytest.raises(IncompatibleError, match=r"model\.safetensors cannot be read"):
        diagnose(workspace, None, tmp_path / "drafter", nothing)
