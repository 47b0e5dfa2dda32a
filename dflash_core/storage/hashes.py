"""sha256 of large files, remembered: a restart must not read 54 GB of weights to learn that nothing has changed.

The trade-off: a file counts as unchanged while its path, inode, size, modification and change time are. Writing sets
the change time and no user can set it back, so only a disk that rots unnoticed escapes; hashing anew costs minutes.
"""

import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from dflash_core.errors import StorageError
from dflash_core.storage.transfers import sha256_file

THREADS = 8


def sha256_files(files: Sequence[Path], memory: Path | None = None) -> list[str]:
    """The sha256 of each file, in order.

    Args:
        files: existing.
        memory: a JSON file that remembers the hashes; None: hash everything now. A damaged one is made anew.

    Raises:
        StorageError: the memory cannot be written.
    """
    known = _read(memory) if memory is not None else {}
    marks = [_mark(file) for file in files]
    new = [file for file, mark in zip(files, marks, strict=True) if known.get(str(file.resolve()), [])[:-1] != mark]
    with ThreadPoolExecutor(max_workers=THREADS) as pool:
        made = dict(zip(new, pool.map(sha256_file, new), strict=True))
    digests = [made[file] if file in made else str(known[str(file.resolve())][-1]) for file in files]
    if memory is not None and new:
        for file, mark, digest in zip(files, marks, digests, strict=True):
            known[str(file.resolve())] = [*mark, digest]
        _write(memory, known)
    return digests


def _mark(file: Path) -> list[int]:
    found = file.stat()
    return [found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns]


def _read(memory: Path) -> dict[str, Any]:
    try:
        table = json.loads(memory.read_text(encoding="utf8"))
        return {str(path): list(entry) for path, entry in table.items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


def _write(memory: Path, table: dict[str, Any]) -> None:
    try:
        memory.parent.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile("w", encoding="utf8", dir=memory.parent, prefix=".hashes-", delete=False) as aside:
            json.dump(table, aside, indent=1)
        os.replace(aside.name, memory)
    except OSError as error:
        raise StorageError(f"cannot write {memory}: {error}; free disk space or set storage.work_dir") from None
