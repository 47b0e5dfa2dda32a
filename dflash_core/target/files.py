"""The target's own files: its configs, the frozen ends that the drafter shares, and the identity of the folder.

Every reader of a target's folder is here. The trade-off: the ends are read straight from whichever safetensors files
hold them, by the names that are in use, so that nobody has to load a whole target for its embedding.
Shapes: V vocabulary, H hidden size.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from dflash_core.errors import IncompatibleError, RecipeError
from dflash_core.local_files import sha256_files
from dflash_core.recipe import Recipe
from dflash_core.records import DrafterCheckpoint

MASK_TOKEN = "<|mask|>"
EMBEDDING_KEYS = (
    "model.embed_tokens.weight",
    "model.language_model.embed_tokens.weight",
    "language_model.model.embed_tokens.weight",
    "embed_tokens.weight",
)
LM_HEAD_KEYS = ("lm_head.weight", "language_model.lm_head.weight", "model.lm_head.weight")
TOKENIZER_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
)


@dataclass(frozen=True)
class TargetHead:
    """The target's frozen ends, which the drafter shares."""

    embedding: torch.Tensor
    """[V, H]"""
    lm_head: torch.Tensor
    """[V, H]; the same tensor as `embedding` where the target ties them."""


def read_target_config(folder: Path) -> dict[str, Any]:
    """The config.json of a Hugging Face folder.

    Raises:
        RecipeError: no such file, or not JSON.
    """
    try:
        table = json.loads((folder / "config.json").read_text(encoding="utf8"))
    except (OSError, ValueError) as error:
        raise RecipeError(f"target.path {folder} has no readable config.json: {error}") from None
    return dict(table)


def text_config(target_config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part that describes the language model (checkpoints with vision nest it under text_config)."""
    nested: Mapping[str, Any] = target_config.get("text_config", target_config)
    return nested


def tokenizer_mask_id(folder: Path) -> int | None:
    """Id of the tokenizer's own mask token (`mask_token`, or an added `<|mask|>`), None where it has none."""
    settings_file, vocabulary_file = folder / "tokenizer_config.json", folder / "tokenizer.json"
    settings = json.loads(settings_file.read_text(encoding="utf8")) if settings_file.exists() else {}
    added = json.loads(vocabulary_file.read_text(encoding="utf8"))["added_tokens"] if vocabulary_file.exists() else []
    name = settings.get("mask_token") or MASK_TOKEN
    if isinstance(name, dict):
        name = name["content"]
    return next((int(token["id"]) for token in added if token["content"] == name), None)


def load_head(folder: Path, dtype: torch.dtype, device: torch.device) -> TargetHead:
    """Read embedding and lm_head alone, from whichever safetensors files hold them.

    Raises:
        RecipeError: the folder has no safetensors, or no embedding or lm_head among them.
    """
    holders: dict[str, Path] = {}
    for file in safetensors_files(folder):
        try:
            with safe_open(file, framework="pt") as opened:
                holders.update(dict.fromkeys(opened.keys(), file))
        except (OSError, SafetensorError) as error:
            raise RecipeError(f"target.path {folder}: {file.name} is damaged ({error}); download it again") from None

    def read(keys: tuple[str, ...]) -> torch.Tensor | None:
        key = next((key for key in keys if key in holders), None)
        if key is None:
            return None
        with safe_open(holders[key], framework="pt") as opened:
            tensor: torch.Tensor = opened.get_tensor(key)
        return tensor.to(device=device, dtype=dtype)

    embedding = read(EMBEDDING_KEYS)
    if embedding is None:
        raise RecipeError(f"target.path {folder} holds no embedding under any of {', '.join(EMBEDDING_KEYS)}")
    lm_head = None if is_tied(folder) else read(LM_HEAD_KEYS)
    if lm_head is None and not is_tied(folder):
        raise RecipeError(
            f"target.path {folder} holds no lm_head under any of {', '.join(LM_HEAD_KEYS)} and does not tie it"
        )
    return TargetHead(embedding, embedding if lm_head is None else lm_head)


def target_fingerprint(folder: Path, work_dir: Path | None = None) -> str:
    """sha256 over the config, every safetensors file and the tokenizer: equal folders give equal features and ids.

    Args:
        folder: the target.
        work_dir: where the hashes of unchanged files are remembered; None: hash everything now.

    Raises:
        RecipeError: the folder is not there or holds no safetensors.
    """
    weights = safetensors_files(folder)
    others = [folder / name for name in ("config.json", *TOKENIZER_FILES) if (folder / name).is_file()]
    digests = sha256_files([*others, *weights], None if work_dir is None else work_dir / "hashes.json")
    named = [(path.name, digest) for path, digest in zip([*others, *weights], digests, strict=True)]
    return hashlib.sha256(json.dumps(sorted(named)).encode()).hexdigest()


def safetensors_files(folder: Path) -> list[Path]:
    """The weight files of the folder, those its index names where it has one.

    Raises:
        RecipeError: the folder, or a file of its index, is not there; or it has no safetensors (pickles are not read).
    """
    if not (folder / "config.json").is_file():
        raise RecipeError(
            f"target.path {folder} is not a model folder (no config.json there); give a local Hugging Face folder"
        )
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError):
            raise RecipeError(f"{index} is not an index of safetensors files; download it again") from None
        files = [folder / name for name in names]
        absent = [file.name for file in files if not file.is_file()]
        if absent:
            raise RecipeError(
                f"target.path {folder} lacks {len(absent)} of {len(files)} weight files, first {absent[0]}"
            )
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise RecipeError(f"target.path {folder} has no *.safetensors; convert its weights (pickles are never loaded)")
    return files


def ties_embeddings(target_config: Mapping[str, Any]) -> bool:
    """Whether this config says that the lm_head is the embedding."""
    text = text_config(target_config)
    return bool(target_config.get("tie_word_embeddings", text.get("tie_word_embeddings", False)))


def is_tied(folder: Path) -> bool:
    """Whether the target's lm_head is its embedding."""
    return ties_embeddings(read_target_config(folder))


def check_target(checkpoint: DrafterCheckpoint, recipe: Recipe) -> None:
    """Refuse a target or tokenizer that is not, byte for byte, the one that the run was trained with.

    Raises:
        IncompatibleError: another one; the message holds both fingerprints.
        RecipeError: the folder is not there or holds no safetensors.
    """
    check_tokenizer(checkpoint.tokenizer_sha256, recipe, f"run {checkpoint.run}")
    folder = recipe.target.path
    fingerprint = target_fingerprint(folder, recipe.storage.work_dir)
    if fingerprint != checkpoint.target_fingerprint:
        raise IncompatibleError(
            f"run {checkpoint.run} was trained with target {checkpoint.target_fingerprint[:12]}, "
            f"{folder} is {fingerprint[:12]}: weights, config or tokenizer differ; use the former"
        )


def tokenizer_sha256(recipe: Recipe) -> str:
    """sha256 of the tokenizer.json that the recipe's token ids come from.

    Raises:
        RecipeError: there is none.
    """
    file = recipe.tokenizer_path / "tokenizer.json"
    if not file.is_file():
        raise RecipeError(f"{file} does not exist; give a tokenizer in Hugging Face form")
    return sha256_files([file])[0]


def check_tokenizer(trained_with: str, recipe: Recipe, what: str) -> None:
    """Refuse a tokenizer whose ids mean something else than those that were trained on.

    Raises:
        IncompatibleError: the message holds the sha256 of both.
    """
    ours = tokenizer_sha256(recipe)
    if ours != trained_with:
        raise IncompatibleError(
            f"{what} was trained with a tokenizer.json of sha256 {trained_with[:12]}, the one in "
            f"{recipe.tokenizer_path} has {ours[:12]}; use the former"
        )
