"""The target's folder: its ends read alone, its mask token, and what makes two folders the same target."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from dflash_core.errors import RecipeError
from dflash_core.target.files import load_head, target_fingerprint, tokenizer_mask_id

CPU = torch.device("cpu")


def test_embedding_and_lm_head_are_read_alone(family: tuple[PreTrainedModel, Path]) -> None:
    model, folder = family
    head = load_head(folder, torch.float32, CPU)
    assert torch.equal(head.embedding, model.get_input_embeddings().weight)
    assert torch.equal(head.lm_head, model.get_output_embeddings().weight)
    assert (head.lm_head is head.embedding) == bool(model.config.get_text_config().tie_word_embeddings)


def test_a_damaged_file_is_named(target_folder: Path, tmp_path: Path) -> None:
    damaged = shutil.copytree(target_folder, tmp_path / "damaged")
    (damaged / "model.safetensors").write_bytes((damaged / "model.safetensors").read_bytes()[:-100])
    with pytest.raises(RecipeError, match="damaged"):
        load_head(damaged, torch.float32, CPU)


def test_mask_token_is_found_in_the_tokenizers_files(tmp_path: Path) -> None:
    assert tokenizer_mask_id(tmp_path) is None
    added = [{"id": 3, "content": "<|mask|>"}, {"id": 4, "content": "[M]"}]
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    assert tokenizer_mask_id(tmp_path) == 3
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"mask_token": {"content": "[M]"}}))
    assert tokenizer_mask_id(tmp_path) == 4


def test_the_fingerprint_follows_weights_config_and_tokenizer_only(target_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(target_folder, tmp_path / "copy")
    (folder / "tokenizer.json").write_text("{}")
    prints = [target_fingerprint(folder)]
    (folder / "README.md").write_text("words")
    assert target_fingerprint(folder) == prints[0]
    for name, change in (
        ("tokenizer.json", lambda body: body + b" "),
        ("config.json", lambda body: body + b" "),
        ("model.safetensors", lambda body: body[:-1] + bytes([body[-1] ^ 1])),
    ):
        (folder / name).write_bytes(change((folder / name).read_bytes()))
        prints.append(target_fingerprint(folder))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    prints.append(target_fingerprint(folder))
    assert len(set(prints)) == 5
