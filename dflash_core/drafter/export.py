"""The export: a finished run's masters in serving's dtype, as the folder that serving engines load, in S3 and locally.

    config.json model.safetensors README.md [speculators/config.json speculators/model.safetensors] manifest.json

The trade-off: the folder is built on the local disk first, so both destinations get the same bytes and each is whole or
not there: the local one by renaming (see `placed`), the one in S3 by its manifest, which goes before anything it names
changes and comes back last.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from dflash_core.drafter.card import Lineage, model_card
from dflash_core.drafter.config import check_fit, read_target_config
from dflash_core.drafter.folder import save_drafter
from dflash_core.drafter.placed import MANIFEST_FILE, building, entry_name, place, verify_folder
from dflash_core.drafter.runs import find_checkpoint
from dflash_core.drafter.speculators import FOLDER, save_speculators
from dflash_core.drafter.target_files import check_target
from dflash_core.drafter.trained import fetch_drafter
from dflash_core.errors import ObjectMissing, StorageError
from dflash_core.quality.training_set import load_statistics, load_training_set
from dflash_core.recipe import Recipe
from dflash_core.records import DrafterCheckpoint, DrafterEval, DrafterExport, ServeCheck, StoredObject
from dflash_core.storage.store import Store, open_stores
from dflash_core.storage.transfers import delete_object, download_file, sha256_file, upload_file

CARD_FILE = "README.md"


def export_drafter(recipe: Recipe, run: str | None) -> DrafterExport:
    """Write drafter_export/<run>/ and `export.local_dir`, each with a manifest of sha256.

    The model card tells lineage, data and, where a report is there, acceptance.

    Args:
        recipe: names stores, target, dtype, forms and local folder.
        run: a finished training run; None: the last one.

    Raises:
        ObjectMissing: no such run, or its training set is gone.
        IncompatibleError: the drafter does not fit the recipe's target; the message holds both values.
        StorageError: a disk is full, or the local folder holds files that no export wrote.
    """
    store = open_stores(recipe).derived
    checkpoint = find_checkpoint(store, run)
    local = recipe.export.local_dir
    destination = recipe.storage.work_dir / f"drafter_export-{checkpoint.run}" if local is None else local.resolve()
    try:
        with building(destination) as folder:
            files = _write(recipe, store, checkpoint, folder)
            export = _upload(_Destination(store, recipe, checkpoint), folder, files)
            if local is not None:
                (folder / MANIFEST_FILE).write_text(export.model_dump_json(indent=1) + "\n", encoding="utf8")
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
        return store.get_record(f"drafter_export/{name}/{MANIFEST_FILE}", DrafterExport)
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
        download_file(store, file, path)
    (folder / MANIFEST_FILE).write_text(export.model_dump_json(indent=1) + "\n", encoding="utf8")


def verify_export(recipe: Recipe, run: str | None) -> DrafterExport:
    """Read every byte of an export again, in S3 and in `export.local_dir` if that is set.

    Raises:
        ObjectMissing: not exported.
        ObjectCorrupt: an object is not what the manifest says.
        IncompatibleError: the local folder is not what its own manifest says, or is another run's.
    """
    store = open_stores(recipe).derived
    export = find_export(store, run)
    with building(recipe.storage.work_dir / f"drafter_export-{export.run}") as folder:
        fetch_export(store, export, folder)
    if recipe.export.local_dir is not None:
        verify_folder(recipe.export.local_dir, export.run)
    return export


def _write(recipe: Recipe, store: Store, checkpoint: DrafterCheckpoint, folder: Path) -> list[Path]:
    """Fill the folder; everything but the manifest."""
    config, state = fetch_drafter(store, checkpoint, recipe.storage.work_dir)
    check_fit(config, read_target_config(recipe.target.path))
    check_target(checkpoint, recipe)
    training_set = load_training_set(recipe, checkpoint.training_set)
    measured = f"drafter_eval/{checkpoint.run}/"
    lineage = Lineage(
        recipe,
        checkpoint,
        training_set,
        load_statistics(recipe, training_set),
        store.find_record(measured + "report.json", DrafterEval),
        store.find_record(measured + "serve_check.json", ServeCheck),
    )
    dtype = getattr(torch, recipe.export.dtype)
    files = save_drafter(folder, config, state, dtype)
    card = folder / CARD_FILE
    card.write_text(model_card(config, lineage), encoding="utf8")
    files.append(card)
    if recipe.export.speculators:
        (folder / FOLDER).mkdir()
        files += save_speculators(folder / FOLDER, config, state, dtype, recipe.target.path)
    return files


@dataclass(frozen=True)
class _Destination:
    """Where in S3, and on whose behalf."""

    store: Store
    recipe: Recipe
    checkpoint: DrafterCheckpoint


def _upload(to: _Destination, folder: Path, files: list[Path]) -> DrafterExport:
    store, run = to.store, to.checkpoint.run
    below = f"drafter_export/{run}/"
    entries = [
        StoredObject(key=below + str(file.relative_to(folder)), size=file.stat().st_size, sha256=sha256_file(file))
        for file in files
    ]
    export = DrafterExport(
        run=run,
        training_set=to.checkpoint.training_set,
        target_fingerprint=to.checkpoint.target_fingerprint,
        tokenizer_sha256=to.checkpoint.tokenizer_sha256,
        dtype=to.recipe.export.dtype,
        files=tuple(entries),
    )
    missing = [(entry, file) for entry, file in zip(entries, files, strict=True) if not store.holds(entry)]
    if missing:
        delete_object(store, below + MANIFEST_FILE)
    for entry, file in missing:
        upload_file(store, entry.key, file)
    store.put_record(below + MANIFEST_FILE, export)
    return export
