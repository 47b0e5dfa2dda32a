"""Remembered hashes: never of other bytes, and no byte is read twice."""

import hashlib
import json
import os
from pathlib import Path

import pytest

from dflash_core import local_files
from dflash_core.errors import StorageError
from dflash_core.local_files import sha256_files


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that were hashed."""
    names: list[str] = []
    real = local_files.sha256_file

    def counting(path: Path) -> str:
        names.append(path.name)
        return real(path)

    monkeypatch.setattr(local_files, "sha256_file", counting)
    return names


def made(folder: Path) -> list[Path]:
    files = [folder / "a", folder / "b"]
    for file in files:
        file.write_bytes(file.name.encode() * 1000)
    return files


def test_unchanged_files_are_not_read_again(tmp_path: Path, read: list[str]) -> None:
    files, memory = made(tmp_path), tmp_path / "below" / "hashes.json"
    expected = [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]
    assert sha256_files(files, memory) == expected
    assert sorted(read) == ["a", "b"]
    assert sha256_files(files[::-1], memory) == expected[::-1]
    assert sorted(read) == ["a", "b"]
    assert sha256_files(files) == expected
    assert len(read) == 4


def test_a_change_is_seen_even_where_size_and_modification_time_are_set_back(tmp_path: Path, read: list[str]) -> None:
    files, memory = made(tmp_path), tmp_path / "hashes.json"
    before, times = sha256_files(files, memory), files[0].stat()
    files[0].write_bytes(b"z" * 1000)
    os.utime(files[0], ns=(times.st_atime_ns, times.st_mtime_ns))
    after = sha256_files(files, memory)
    assert after[0] != before[0]
    assert after[1] == before[1]
    assert read[2:] == ["a"]


@pytest.mark.parametrize("body", ["", "[1]", '{"x": 1}', '{"a": {}}'])
def test_a_damaged_memory_is_made_again(tmp_path: Path, body: str) -> None:
    files, memory = made(tmp_path), tmp_path / "hashes.json"
    memory.write_text(body)
    assert sha256_files(files, memory) == sha256_files(files)
    assert len(json.loads(memory.read_text())) >= 2


def test_a_memory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    files = made(tmp_path)
    with pytest.raises(StorageError, match=r"cannot write .*a/hashes\.json: .*storage\.work_dir"):
        sha256_files(files, files[0] / "hashes.json")  # below a file
