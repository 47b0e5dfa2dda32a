"""A drafter on disk in the published form: config.json and safetensors, exactly the tensors serving engines look for.

    config.json model.safetensors (or several with an index); an export of ours also has manifest.json

The trade-off: servers ignore tensors they do not know and start with garbage where one is missing, without a word; so
reading here is strict, by name and shape. JSON and safetensors only: nothing that is read can run code.
"""

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dflash_core.drafter.config import DrafterConfig
from dflash_core.drafter.model import Drafter
from dflash_core.errors import IncompatibleError, ObjectMissing, StorageError
from dflash_core.local_files import sha256_file, sync
from dflash_core.records import DrafterCheckpoint, DrafterExport, StoredObject
from dflash_core.storage.layout import CONFIG_FILE, MANIFEST_FILE, WEIGHTS_FILE, RunKeys
from dflash_core.workspace import Workspace

WEIGHTS_PATTERN = "model{suffix}.safetensors"
INDEX_FILE = "model.safetensors.index.json"
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
    files, places = save_tensors(folder, tensors, WEIGHTS_PATTERN, shard_bytes)
    if len(files) > 1:
        total = sum(tensor.nbytes for tensor in tensors.values())
        files.append(write_json(folder / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": places}))
    sync(folder)
    return files


def save_tensors(
    folder: Path, tensors: dict[str, Tensor], pattern: str, shard_bytes: int
) -> tuple[list[Path], dict[str, str]]:
    """Write tensors as safetensors, split where they need more than `shard_bytes`; each file is synced to disk.

    Args:
        folder: existing.
        tensors: contiguous, in host memory.
        pattern: of file names, with {suffix} for the number of several.
        shard_bytes: of one file at most, where no tensor is larger.

    Returns:
        The files, and each tensor's file by name.
    """
    split = split_torch_state_dict_into_shards(tensors, filename_pattern=pattern, max_shard_size=shard_bytes)
    files = []
    for name, members in split.filename_to_tensors.items():
        files.append(folder / name)
        save_file({member: tensors[member] for member in members}, files[-1], {"format": "pt"})
        sync(files[-1])
    return files, split.tensor_to_filename


def read_config(folder: Path) -> DrafterConfig:
    """The config.json of a drafter folder.

    Raises:
        IncompatibleError: missing, not JSON, or not the config of a DFlash drafter.
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
            raise IncompatibleError(f"{folder / INDEX_FILE} names {name!r}, which is not a file of that folder")
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


def fetch_drafter(workspace: Workspace, checkpoint: DrafterCheckpoint) -> tuple[DrafterConfig, dict[str, Tensor]]:
    """Download and verify a run's config and fp32 masters; they pass through the work dir and leave nothing there.

    Raises:
        ObjectCorrupt: an object is not what the manifest says.
        IncompatibleError: config and tensors do not belong together.
        StorageError: no room on the local disk.
    """
    work_dir = workspace.work_dir
    try:
        work_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".drafter-", dir=work_dir) as name:
            folder = Path(name)
            workspace.derived.download(checkpoint.config, folder / CONFIG_FILE)
            workspace.derived.download(checkpoint.weights, folder / WEIGHTS_FILE)
            config = read_config(folder)
            # Cloned: the tensors map the file, which is about to go.
            return config, {name: tensor.clone() for name, tensor in read_state(folder, config).items()}
    except ObjectMissing as error:
        raise ObjectMissing(f"run {checkpoint.run} is not whole any more: {error}; train it again") from None
    except OSError as error:
        raise StorageError(f"storage.work_dir {work_dir} cannot take the drafter: {error}; free disk space") from None


def verify_folder(folder: Path, run: str | None = None) -> DrafterExport:
    """Read every file again and compare size and sha256 with the folder's manifest.

    Args:
        folder: an exported one.
        run: whose export it has to be; None: any.

    Raises:
        IncompatibleError: no manifest, a file that is missing or differs (both values), or another run's export.
    """
    manifest = read_manifest(folder)
    if manifest is None:
        raise IncompatibleError(f"{folder} holds no {MANIFEST_FILE} of an export; export it again (dflash export)")
    if run not in (None, manifest.run):
        raise IncompatibleError(f"{folder} holds the export of run {manifest.run}, not of {run}; export that again")
    for file in manifest.files:
        path = folder / entry_name(manifest, file)
        found = (path.stat().st_size, sha256_file(path)) if path.is_file() else (0, "absent")
        if found != (file.size, file.sha256):
            raise IncompatibleError(
                f"{path} has {found[0]} bytes with sha256 {found[1][:12]}, its manifest says {file.size} with "
                f"{file.sha256[:12]}: it was damaged or changed; export it again"
            )
    return manifest


def read_manifest(folder: Path) -> DrafterExport | None:
    """The manifest of an exported folder; None where there is none, as in a folder from elsewhere.

    Raises:
        IncompatibleError: one that this version cannot read.
    """
    path = folder / MANIFEST_FILE
    if not path.is_file():
        return None
    try:
        return DrafterExport.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise IncompatibleError(
            f"{path} is not a manifest that this version can read: {error.errors()[0]['msg']}"
        ) from None


def entry_name(export: DrafterExport, file: StoredObject) -> str:
    """A file's path within the folder.

    Raises:
        IncompatibleError: the manifest names a place outside of it.
    """
    name = file.key.removeprefix(RunKeys(export.run).export_folder)
    if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts or not name:
        raise IncompatibleError(
            f"the manifest of run {export.run} names {file.key!r}, which is not a file of its export"
        )
    return name


def _some(names: set[str]) -> str:
    listed = sorted(names)
    return ", ".join(listed[:4]) + (f" and {len(listed) - 4} more" if len(listed) > 4 else "")


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
