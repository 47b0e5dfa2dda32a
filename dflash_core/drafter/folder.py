"""A drafter on disk in the published form: config.json and safetensors, exactly the tensors serving engines look for.

The trade-off: servers ignore tensors they do not know and start with garbage where one is missing, in silence; so
reading here is strict, by name and shape. JSON and safetensors only: nothing that is read can run code.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dflash_core.drafter.config import DrafterConfig
from dflash_core.drafter.model import Drafter
from dflash_core.errors import IncompatibleError

CONFIG_FILE, WEIGHTS_FILE, INDEX_FILE = "config.json", "model.safetensors", "model.safetensors.index.json"
SHARD_BYTES = 5_000_000_000


def tensor_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor of the published checkpoint: 11 a layer and three more."""
    with torch.device("meta"):
        return {name: tuple(tensor.shape) for name, tensor in Drafter(config).state_dict().items()}


def check_state(config: DrafterConfig, state: Mapping[str, Tensor], where: str) -> None:
    """Refuse a set of tensors that is not exactly this drafter's.

    Raises:
        IncompatibleError: tensors are missing, unexpected or of another shape; the message names them.
    """
    shapes = tensor_shapes(config)
    problems = [f"lacks {_some(shapes.keys() - state.keys())}"] if shapes.keys() - state.keys() else []
    if state.keys() - shapes.keys():
        problems.append(f"has unexpected {_some(state.keys() - shapes.keys())}")
    problems += [
        f"has {name} of shape {list(state[name].shape)} where config.json asks for {list(shape)}"
        for name, shape in shapes.items()
        if name in state and tuple(state[name].shape) != shape
    ][:3]
    if problems:
        raise IncompatibleError(f"{where} {' and '.join(problems)}; it does not fit its config.json")


def save_drafter(
    folder: Path, config: DrafterConfig, state: Mapping[str, Tensor], dtype: torch.dtype, shard_bytes: int = SHARD_BYTES
) -> list[Path]:
    """Write config.json and the weights in `dtype` into an existing folder, each file synced to disk.

    Args:
        folder: existing; files of the same names are replaced.
        config: its dtype is replaced by `dtype`.
        state: exactly the drafter's tensors.
        dtype: of the written weights.
        shard_bytes: weights beyond this are split over several files with an index.

    Returns:
        The files written, config.json first.
    """
    check_state(config, state, "the drafter to save")
    table = config.to_json() | {"dtype": str(dtype).removeprefix("torch.")}
    return [write_json(folder / CONFIG_FILE, table), *write_weights(folder, state, dtype, shard_bytes)]


def write_weights(folder: Path, state: Mapping[str, Tensor], dtype: torch.dtype, shard_bytes: int) -> list[Path]:
    """Write tensors in `dtype` as one safetensors file, or beyond `shard_bytes` as several with an index.

    Returns:
        The files written, the index last; each and the folder are synced to disk.
    """
    tensors = {name: state[name].detach().to("cpu", dtype).contiguous() for name in sorted(state)}
    shards: list[dict[str, Tensor]] = [{}]
    room = shard_bytes
    for name, tensor in tensors.items():
        if tensor.nbytes > room and shards[-1]:
            shards.append({})
            room = shard_bytes
        shards[-1][name] = tensor
        room -= tensor.nbytes
    names = [WEIGHTS_FILE] if len(shards) == 1 else [_shard_name(i, len(shards)) for i in range(len(shards))]
    files = [folder / name for name in names]
    for file, shard in zip(files, shards, strict=True):
        save_file(shard, file, {"format": "pt"})
        sync(file)
    if len(shards) > 1:
        places = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
        total = sum(tensor.nbytes for tensor in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": places}
        files.append(write_json(folder / INDEX_FILE, index))
    sync(folder)
    return files


def read_config(folder: Path) -> DrafterConfig:
    """The config.json of a drafter folder.

    Raises:
        IncompatibleError: missing, no JSON, or no config of a DFlash drafter.
    """
    return DrafterConfig.from_json(_read_json(folder / CONFIG_FILE))


def read_state(folder: Path, config: DrafterConfig) -> dict[str, Tensor]:
    """The tensors of a drafter folder as stored, one file or sharded, checked against the config.

    Raises:
        IncompatibleError: a file is missing or damaged, or the tensors are not this drafter's.
    """
    names = [WEIGHTS_FILE]
    if (folder / INDEX_FILE).exists():
        names = sorted(set(_read_json(folder / INDEX_FILE)["weight_map"].values()))
    state: dict[str, Tensor] = {}
    for name in names:
        if Path(name).name != name:
            raise IncompatibleError(f"{folder / INDEX_FILE} names {name!r}, which is no file of that folder")
        try:
            with safe_open(folder / name, "pt") as file:
                state |= {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (no mapping)
        except (OSError, SafetensorError) as error:
            raise IncompatibleError(f"{folder / name} cannot be read: {error}") from None
    check_state(config, state, str(folder))
    return state


def load_drafter(folder: Path, dtype: torch.dtype = torch.float32) -> Drafter:
    """Read a published, exported or checkpointed drafter folder on the CPU; weights in `dtype`."""
    config = read_config(folder)
    return build_drafter(config, read_state(folder, config), dtype)


def build_drafter(config: DrafterConfig, state: Mapping[str, Tensor], dtype: torch.dtype = torch.float32) -> Drafter:
    """A drafter with these weights, on the CPU."""
    drafter = Drafter(config).to(dtype)
    drafter.load_state_dict(dict(state))
    return drafter


def _some(names: set[str]) -> str:
    listed = sorted(names)
    return ", ".join(listed[:4]) + (f" and {len(listed) - 4} more" if len(listed) > 4 else "")


def _shard_name(index: int, count: int) -> str:
    return f"model-{index + 1:05d}-of-{count:05d}.safetensors"


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf8")))
    except (OSError, ValueError) as error:
        raise IncompatibleError(f"{path} cannot be read: {error}") from None


def write_json(path: Path, table: Mapping[str, Any]) -> Path:
    """A JSON file, synced to disk."""
    path.write_text(json.dumps(table, indent=1) + "\n", encoding="utf8")
    sync(path)
    return path


def sync(path: Path) -> None:
    """Have a file, or the names in a folder, on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
