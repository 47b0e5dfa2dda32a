"""Files and folders of the local disk: written whole or not at all, locked, hashed.

Whole means: written under another name in the same folder, synced, then renamed. A kill at any instant leaves the old
one, the new one, or (for a folder, which can be renamed only over an empty one) for an instant neither, and then the
next writer puts the old one back first.
"""

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from dflash_core.errors import StorageError

HASH_BLOCK = 1 << 20
HASH_THREADS = 8
PRIVATE = 0o600
"""Permissions of a file for its owner alone."""


def write_whole(path: Path, content: str | bytes, mode: int = 0o666) -> None:
    """Write a file that is there in full or not at all, and on the disk; `mode`: its permissions before the umask.

    Raises:
        OSError: the disk is full or the folder cannot be written.
    """
    aside = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    try:
        with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)
    sync(path.parent)


def sync(path: Path) -> None:
    """Have a file, or the names in a folder, on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def locked(path: Path, refusal: Exception) -> Iterator[int]:
    """Hold the lock file `path` while the context lasts; yields its descriptor.

    The lock belongs to whoever has the descriptor: a child process that inherits it keeps the lock when we are killed.

    Raises:
        refusal: another process holds it.
    """
    held: list[int] = []
    lock = FileLock(path, timeout=0, on_acquired=held.append)
    try:
        lock.acquire()
    except Timeout:
        raise refusal from None
    try:
        yield held[0]
    finally:
        lock.release()


@contextmanager
def building(destination: Path, refusal: Exception) -> Iterator[Path]:
    """An empty folder next to `destination`, for one process at a time; what is left of it afterwards is removed.

    Raises:
        refusal: another process builds for the same place.
    """
    destination.parent.mkdir(parents=True, exist_ok=True)
    lock, aside = _beside(destination, "lock"), _beside(destination, "new")
    with locked(lock, refusal):
        shutil.rmtree(aside, ignore_errors=True)
        _put_back(destination)
        aside.mkdir()
        try:
            yield aside
        finally:
            shutil.rmtree(aside, ignore_errors=True)
            lock.unlink(missing_ok=True)


def place(folder: Path, destination: Path) -> None:
    """Rename a finished folder to `destination`; what is there is replaced.

    Raises:
        OSError: the disk is full or the place cannot be written.
    """
    for path in (*(file for file in folder.rglob("*") if file.is_file()), folder):
        sync(path)
    old = _beside(destination, "old")
    if destination.exists():
        shutil.rmtree(old, ignore_errors=True)  # of a kill right after the renames; a rename cannot replace it
        os.rename(destination, old)
    os.rename(folder, destination)
    sync(destination.parent)
    shutil.rmtree(old, ignore_errors=True)


def _put_back(destination: Path) -> None:
    """Undo the first half of an interrupted `place`, or finish its second."""
    old = _beside(destination, "old")
    if old.is_dir() and not destination.exists():
        os.rename(old, destination)
    shutil.rmtree(old, ignore_errors=True)


def _beside(path: Path, what: str) -> Path:
    return path.with_name(f".{path.name}.{what}")


def sha256_file(path: Path) -> str:
    """sha256 of a file, read in blocks."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(HASH_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def sha256_files(files: Sequence[Path], memory: Path | None = None) -> list[str]:
    """The sha256 of each file, in order.

    A restart must not read 54 GB of weights to learn that nothing has changed, so hashes can be remembered: a file
    counts as unchanged while its path, inode, size, modification and change time are. Writing sets the change time and
    no user can set it back, so only a disk that rots unnoticed escapes.

    Args:
        files: existing.
        memory: a JSON file that remembers the hashes; None: hash everything now. A damaged one is made again.

    Raises:
        StorageError: the memory cannot be written.
    """
    known = _read_memory(memory) if memory is not None else {}
    marks = [_mark(file) for file in files]
    new = [file for file, mark in zip(files, marks, strict=True) if known.get(str(file.resolve()), [])[:-1] != mark]
    with ThreadPoolExecutor(max_workers=HASH_THREADS) as pool:
        made = dict(zip(new, pool.map(sha256_file, new), strict=True))
    digests = [made[file] if file in made else str(known[str(file.resolve())][-1]) for file in files]
    if memory is not None and new:
        for file, mark, digest in zip(files, marks, digests, strict=True):
            known[str(file.resolve())] = [*mark, digest]
        try:
            memory.parent.mkdir(parents=True, exist_ok=True)
            write_whole(memory, json.dumps(known, indent=1))
        except OSError as error:
            raise StorageError(f"cannot write {memory}: {error}; free disk space or set storage.work_dir") from None
    return digests


def _mark(file: Path) -> list[int]:
    found = file.stat()
    return [found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns]


def _read_memory(memory: Path) -> dict[str, Any]:
    try:
        table = json.loads(memory.read_text(encoding="utf8"))
        return {str(path): list(entry) for path, entry in table.items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}
