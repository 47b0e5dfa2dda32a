"""The export: a finished run's masters in serving's dtype, as the folder that serving engines load, in S3 and locally.

The trade-off: the folder is built on the local disk first, so both destinations get the same bytes and each appears
whole: the local one by renaming, the one in S3 by a manifest written last.
"""

import os
import tempfile
from pathlib import Path

import torch

from dflash_core.drafter.card import model_card
from dflash_core.drafter.config import check_fit, read_target_config
from dflash_core.drafter.folder import save_drafter
from dflash_core.drafter.target_files import check_target
from dflash_core.drafter.trained import fetch_drafter, find_checkpoint
from dflash_core.errors import StorageError
from dflash_core.quality.training_set import load_training_set
from dflash_core.recipe import Recipe
from dflash_core.records import DrafterEval, DrafterExport, StoredObject
from dflash_core.storage.store import Store, open_stores
from dflash_core.storage.transfers import sha256_file, upload_file

CARD_FILE, MANIFEST_FILE = "README.md", "manifest.json"


def export_drafter(recipe: Recipe, run: str | None) -> DrafterExport:
    """Write drafter_export/<run>/ (config.json, weights, README.md, manifest.json last) and `export.local_dir`.

    The model card tells lineage, data and, where a report is there, acceptance.

    Args:
        recipe: names stores, target, dtype and local folder.
        run: a finished training run; None: the last one.

    Raises:
        ObjectMissing: no such run, or its training set is gone.
        IncompatibleError: the drafter does not fit the recipe's target; the message holds both values.
        StorageError: a disk is full, or the local folder holds files that no export wrote.
    """
    store = open_stores(recipe).derived
    checkpoint = find_checkpoint(store, run)
    config, state = fetch_drafter(store, checkpoint, recipe.storage.work_dir)
    check_fit(config, read_target_config(recipe.target.path))
    check_target(checkpoint, recipe.target.path)
    training_set = load_training_set(recipe, checkpoint.training_set)
    report = store.find_record(f"drafter_eval/{checkpoint.run}/report.json", DrafterEval)
    local = recipe.export.local_dir
    try:
        home = recipe.storage.work_dir if local is None else local.absolute().parent
        home.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".export-", dir=home) as name:
            folder = Path(name, "new")
            folder.mkdir()
            files = save_drafter(folder, config, state, getattr(torch, recipe.export.dtype))
            card = folder / CARD_FILE
            card.write_text(model_card(recipe, config, checkpoint, training_set, report), encoding="utf8")
            export = _upload(store, checkpoint.run, checkpoint.training_set, recipe.export.dtype, [*files, card])
            if local is not None:
                (folder / MANIFEST_FILE).write_text(export.model_dump_json(indent=1) + "\n", encoding="utf8")
                _place(folder, local)
    except OSError as error:
        raise StorageError(f"the export cannot be written: {error}; free disk space or change the folder") from None
    return export


def _upload(store: Store, run: str, training_set: str, dtype: str, files: list[Path]) -> DrafterExport:
    below = f"drafter_export/{run}/"
    stored = []
    for file in files:
        entry = StoredObject(key=below + file.name, size=file.stat().st_size, sha256=sha256_file(file))
        stored.append(entry if store.holds(entry) else upload_file(store, entry.key, file))
    export = DrafterExport(run=run, training_set=training_set, dtype=dtype, files=tuple(stored))
    store.put_record(below + MANIFEST_FILE, export)
    return export


def _place(folder: Path, destination: Path) -> None:
    """Rename `folder` to `destination`; an earlier export there is replaced, nothing else is.

    Raises:
        StorageError: the destination holds something that is no export.
    """
    if destination.exists():
        if any(destination.iterdir()) and not (destination / MANIFEST_FILE).exists():
            raise StorageError(
                f"export.local_dir {destination} holds files but no {MANIFEST_FILE} of an export; name an empty folder"
            )
        os.rename(destination, folder.with_name("old"))
    os.rename(folder, destination)
