"""An exported folder on the local disk: built aside, renamed into place, verified by its manifest, never in our way.

The trade-off: a folder can be renamed over an empty one only, so the export that is replaced steps aside first. A kill
in that instant leaves no folder, never a half one; the next export, even one that fails, puts the old one back first.
Files that no export wrote are never removed.
"""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from pydantic import ValidationError

from dflash_core.drafter.folder import sync
from dflash_core.errors import IncompatibleError, StorageError
from dflash_core.records import DrafterExport, StoredObject
from dflash_core.storage.transfers import sha256_file

MANIFEST_FILE = "manifest.json"


@contextmanager
def building(destination: Path) -> Iterator[Path]:
    """An empty folder beside `destination`, for one process at a time; what is left of it afterwards is removed.

    Raises:
        StorageError: another process exports to the same place.
    """
    aside = destination.with_name(f".{destination.name}.new")
    aside.mkdir(parents=True, exist_ok=True)
    handle = os.open(aside, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StorageError(f"another process is exporting to {destination}; wait for it") from None
        _empty(aside)
        _recover(destination)
        try:
            yield aside
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    finally:
        os.close(handle)


def place(folder: Path, destination: Path) -> None:
    """Rename a whole folder, its manifest included, to `destination`; an earlier export there is replaced.

    Raises:
        StorageError: the destination holds anything that no export wrote; nothing is changed.
    """
    for path in (*(file for file in folder.rglob("*") if file.is_file()), folder):
        sync(path)
    old = _old(destination)
    if destination.exists():
        _require_ours(destination)
        os.rename(destination, old)
    os.rename(folder, destination)
    sync(destination.parent)
    shutil.rmtree(old, ignore_errors=True)


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
            f"{path} is no manifest that this version can read: {error.errors()[0]['msg']}"
        ) from None


def entry_name(export: DrafterExport, file: StoredObject) -> str:
    """A file's path within the folder.

    Raises:
        IncompatibleError: the manifest names a place outside of it.
    """
    name = file.key.removeprefix(f"drafter_export/{export.run}/")
    if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts or not name:
        raise IncompatibleError(f"the manifest of run {export.run} names {file.key!r}, which is no file of its export")
    return name


def _recover(destination: Path) -> None:
    """Undo the first half of an interrupted `place`, or finish its second."""
    old = _old(destination)
    if old.is_dir() and not destination.exists():
        os.rename(old, destination)
    shutil.rmtree(old, ignore_errors=True)


def _require_ours(destination: Path) -> None:
    if not destination.is_dir():
        raise StorageError(f"export.local_dir {destination} is a file; name a folder")
    try:
        manifest = read_manifest(destination)
    except IncompatibleError as error:
        raise StorageError(f"export.local_dir: {error}; name an empty folder") from None
    ours = {MANIFEST_FILE} | ({entry_name(manifest, file) for file in manifest.files} if manifest else set())
    foreign = sorted(
        str(path.relative_to(destination))
        for path in destination.rglob("*")
        if not path.is_dir() and str(path.relative_to(destination)) not in ours
    )
    if foreign:
        raise StorageError(
            f"export.local_dir {destination} holds {foreign[0]}, which no export wrote ({len(foreign)} such files); "
            "move them away or name an empty folder"
        )


def _old(destination: Path) -> Path:
    return destination.with_name(f".{destination.name}.old")


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
