"""The export: a finished run's masters in serving's dtype, as the folder that serving engines load, in S3 and locally.

    config.json model.safetensors README.md [speculators/config.json speculators/model.safetensors] manifest.json

The trade-off: the folder is built on the local disk first, so both destinations get the same bytes and each is whole or
not there: the local one by renaming, the one in S3 by its manifest, which goes before anything it names changes and
comes back last. Files of the local folder that no export wrote are never removed.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import torch

from dflash_core.drafter.config import check_fit
from dflash_core.drafter.folder import entry_name, fetch_drafter, read_manifest, save_drafter, verify_folder
from dflash_core.drafter.runs import find_checkpoint
from dflash_core.errors import IncompatibleError, ObjectMissing, StorageError
from dflash_core.export.card import Provenance, model_card
from dflash_core.export.speculators import FOLDER, save_speculators
from dflash_core.local_files import building, place, sha256_file
from dflash_core.records import DrafterCheckpoint, DrafterEval, DrafterExport, ServeCheck, StoredObject
from dflash_core.storage.layout import MANIFEST_FILE, RunKeys
from dflash_core.storage.s3 import Store
from dflash_core.target.files import check_target, read_target_config
from dflash_core.training_set.freeze import load_statistics, load_training_set
from dflash_core.workspace import Workspace

CARD_FILE = "README.md"


def export_drafter(workspace: Workspace, run: str | None) -> DrafterExport:
    """Write drafter_export/<run>/ and `export.local_dir`, each with a manifest of sha256.

    The model card tells lineage, data and, where a report is there, acceptance.

    Args:
        workspace: its recipe names target, dtype, forms and local folder.
        run: a finished training run; None: the last one.

    Raises:
        ObjectMissing: no such run, or its training set is gone.
        IncompatibleError: the drafter does not fit the recipe's target; the message holds both values.
        StorageError: a disk is full, or the local folder holds files that no export wrote.
    """
    checkpoint = find_checkpoint(workspace.derived, run)
    local = workspace.recipe.export.local_dir
    destination = _scratch(workspace, checkpoint.run) if local is None else local.resolve()
    try:
        with _building(destination) as folder:
            files = _write(workspace, checkpoint, folder)
            export = _upload(workspace, checkpoint, folder, files)
            if local is not None:
                _write_manifest(folder, export)
                require_ours(destination)
                place(folder, destination)
    except OSError as error:
        raise StorageError(f"the export cannot be written: {error}; free disk space or change the folder") from None
    return export


def find_export(store: Store, run: str | None) -> DrafterExport:
    """The manifest of an exported run.

    Raises:
        ObjectMissing: no such run, or it has not been exported.
    """
    name = find_checkpoint(store, run).run
    try:
        return store.get_record(RunKeys(name).export_manifest, DrafterExport)
    except ObjectMissing:
        raise ObjectMissing(f"run {name} has not been exported whole; export it first (dflash export)") from None


def fetch_export(store: Store, export: DrafterExport, folder: Path) -> None:
    """Download an export into an existing folder, every file verified.

    Raises:
        ObjectMissing: a file is gone.
        ObjectCorrupt: a file is not what the manifest says.
    """
    for file in export.files:
        path = folder / entry_name(export, file)
        path.parent.mkdir(parents=True, exist_ok=True)
        store.download(file, path)
    _write_manifest(folder, export)


def verify_export(workspace: Workspace, run: str | None) -> DrafterExport:
    """Read every byte of an export again, in S3 and in `export.local_dir` if that is set.

    Raises:
        ObjectMissing: not exported.
        ObjectCorrupt: an object is not what the manifest says.
        IncompatibleError: the local folder is not what its own manifest says, or is another run's.
    """
    export, local = find_export(workspace.derived, run), workspace.recipe.export.local_dir
    with _building(_scratch(workspace, export.run)) as folder:
        fetch_export(workspace.derived, export, folder)
    if local is not None:
        verify_folder(local, export.run)
    return export


def require_ours(destination: Path) -> None:
    """Refuse a folder that holds anything besides an earlier export; one that is not there is fine.

    Raises:
        StorageError: it does; nothing is changed.
    """
    if not destination.exists():
        return
    if not destination.is_dir():
        raise StorageError(f"export.local_dir {destination} is a file; name a folder")
    try:
        manifest = read_manifest(destination)
    except IncompatibleError as error:
        raise StorageError(f"export.local_dir: {error}; name an empty folder") from None
    ours = {MANIFEST_FILE} | ({entry_name(manifest, file) for file in manifest.files} if manifest else set())
    found = (str(path.relative_to(destination)) for path in destination.rglob("*") if not path.is_dir())
    foreign = sorted(name for name in found if name not in ours)
    if foreign:
        raise StorageError(
            f"export.local_dir {destination} holds {foreign[0]}, which no export wrote ({len(foreign)} such files); "
            "move them away or name an empty folder"
        )


def _scratch(workspace: Workspace, run: str) -> Path:
    return workspace.work_dir / f"drafter_export-{run}"


def _building(destination: Path) -> AbstractContextManager[Path]:
    return building(destination, StorageError(f"another process is exporting to {destination}; wait for it"))


def _write(workspace: Workspace, checkpoint: DrafterCheckpoint, folder: Path) -> list[Path]:
    """Fill the folder; everything but the manifest."""
    recipe, store, keys = workspace.recipe, workspace.derived, RunKeys(checkpoint.run)
    config, state = fetch_drafter(workspace, checkpoint)
    check_fit(config, read_target_config(recipe.target.path))
    check_target(checkpoint, recipe)
    training_set = load_training_set(store, checkpoint.training_set)
    provenance = Provenance(
        recipe,
        checkpoint,
        training_set,
        load_statistics(store, training_set),
        store.find_record(keys.report, DrafterEval),
        store.find_record(keys.serve_check, ServeCheck),
    )
    dtype = getattr(torch, recipe.export.dtype)
    files = save_drafter(folder, config, state, dtype)
    card = folder / CARD_FILE
    card.write_text(model_card(config, provenance), encoding="utf8")
    files.append(card)
    if recipe.export.speculators:
        (folder / FOLDER).mkdir()
        files += save_speculators(folder / FOLDER, config, state, dtype, recipe.target.path)
    return files


def _upload(workspace: Workspace, checkpoint: DrafterCheckpoint, folder: Path, files: Sequence[Path]) -> DrafterExport:
    """Only what is not there yet; the manifest goes first and comes back last."""
    store, recipe, keys = workspace.derived, workspace.recipe, RunKeys(checkpoint.run)
    entries = {
        file: StoredObject(
            key=keys.export_folder + str(file.relative_to(folder)), size=file.stat().st_size, sha256=sha256_file(file)
        )
        for file in files
    }
    export = DrafterExport(
        run=checkpoint.run,
        training_set=checkpoint.training_set,
        target_fingerprint=checkpoint.target_fingerprint,
        tokenizer_sha256=checkpoint.tokenizer_sha256,
        dtype=recipe.export.dtype,
        files=tuple(entries.values()),
    )
    missing = {file: entry for file, entry in entries.items() if not store.holds(entry)}
    if missing:
        store.delete(keys.export_manifest)
    for file, entry in missing.items():
        store.upload(entry.key, file)
    store.put_record(keys.export_manifest, export)
    return export


def _write_manifest(folder: Path, export: DrafterExport) -> None:
    (folder / MANIFEST_FILE).write_text(export.model_dump_json(indent=1) + "\n", encoding="utf8")
