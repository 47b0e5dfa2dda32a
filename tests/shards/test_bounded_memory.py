"""Hostile bytes cost bounded memory, get a reason, and the row behind them is kept: a process that may hold 1 GiB."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = r"""
import gzip, json, resource, struct, sys, zlib
import zstandard
from dflash_core.errors import UnreadableFile
from dflash_core.recipe import Recipe
from dflash_core.records import SourceFile
from dflash_core.shards.tokenize_file import FileTokenizer

tokenizer = FileTokenizer(Recipe.model_validate_json(sys.argv[1]))
ANSWER = "The quick brown fox jumps over the lazy dog, and the answer is 42."
GOOD = json.dumps({"prompt": "q", "completion": ANSWER}).encode()
MIB, GIB = 1 << 20, 1 << 30

def gzip_of(line_bytes, end):
    compressor = zlib.compressobj(1, zlib.DEFLATED, 31)
    parts = [compressor.compress(b"x" * MIB) for _ in range(line_bytes // MIB)]
    return b"".join([*parts, compressor.compress(end), compressor.flush()])

def zstd_of(line_bytes, end):
    compressor = zstandard.ZstdCompressor(level=1, write_content_size=False).compressobj()
    parts = [compressor.compress(b"x" * MIB) for _ in range(line_bytes // MIB)]
    return b"".join([*parts, compressor.compress(end), compressor.flush()])

def declared(size):
    "A zstd frame whose header promises `size` bytes."
    frame = zstandard.ZstdCompressor(write_content_size=False).compress(GOOD * 50)
    assert not frame[4] & 0b11100000  # a window descriptor follows, and no content size
    return frame[:4] + bytes([frame[4] | 0b11000000, frame[5]]) + struct.pack("<Q", size) + frame[6:]

def wide_window():
    "A zstd frame that asks for a window of 2 GiB."
    frame = zstandard.ZstdCompressor(write_content_size=False).compress(GOOD)
    return frame[:5] + bytes([0b10101000]) + frame[6:]

def lied_about(size):
    "A gzip member whose trailer says another length."
    return gzip.compress(GOOD)[:-4] + struct.pack("<I", size)

CASES = {
    "a line of 16 MB": lambda: b'{"prompt": "' + b"x" * (16 * MIB) + b'"}\n' + GOOD,
    "16 MB of NUL": lambda: b"\0" * (16 * MIB) + b"\n" + GOOD,
    "16 MB of brackets": lambda: b"[" * (7 * MIB) + b"\n" + b"[" * (16 * MIB) + b"\n" + GOOD,
    "objects nested a million deep": lambda: b'{"a":' * MIB + b"1" + b"}" * MIB + b"\n" + GOOD,
    "a hundred thousand blank lines": lambda: b"\n" * 100_000 + GOOD,
    "ten million lines of two bytes": lambda: b"ab\n" * (10 * MIB) + GOOD,
    "a billion blank lines": lambda: gzip.compress(b"\n" * (64 * MIB)) * 16,
    "a line of 1 GB in gzip": lambda: gzip_of(1000 * MIB, b"\n" + GOOD),
    "a line of 1 GB in zstd": lambda: zstd_of(1000 * MIB, b"\n" + GOOD),
    "10 GB in gzip": lambda: gzip_of(64 * MIB, b"\n") * 160,
    "10 GB in zstd": lambda: zstd_of(64 * MIB, b"\n") * 160,
    "10 GB declared in zstd": lambda: declared(10 * GIB),
    "a window of 2 GB in zstd": wide_window,
    "another length in the gzip trailer": lambda: lied_about(3 * GIB),
}
resource.setrlimit(resource.RLIMIT_AS, (GIB, GIB))
found = {}
for name, make in CASES.items():
    body = make()
    source = SourceFile(partition="p", key="k", uri="s3://b/p", etag="e", size=len(body))
    try:
        done = tokenizer.tokenize(body, source, "0")
        found[name] = [done.statistics.rows_kept, {**done.statistics.rejected, **done.statistics.dropped}]
    except UnreadableFile as error:
        found[name] = str(error)
    del body
print(json.dumps(found))
"""
OUTCOMES = {
    "a line of 16 MB": [1, {"line too long": 1}],
    "16 MB of NUL": [1, {"line too long": 1}],
    "16 MB of brackets": [1, {"line too long": 1, "nested too deeply": 1}],
    "objects nested a million deep": [1, {"nested too deeply": 1}],
    "a hundred thousand blank lines": [1, {"blank line": 100_000}],
    "ten million lines of two bytes": "s3://b/p: more than 100,000 of its lines are rejected, the last at line 100001",
    "a billion blank lines": "s3://b/p: more than 100,000 of its lines are rejected, the last at line 100001",
    "a line of 1 GB in gzip": [1, {"line too long": 1}],
    "a line of 1 GB in zstd": [1, {"line too long": 1}],
    "10 GB in gzip": "s3://b/p holds more than 1073741824 bytes of text; split it into smaller files",
    "10 GB in zstd": "s3://b/p holds more than 1073741824 bytes of text; split it into smaller files",
    "10 GB declared in zstd": "s3://b/p is a damaged zstd stream",
    "a window of 2 GB in zstd": "s3://b/p is a damaged zstd stream",
    "another length in the gzip trailer": "s3://b/p is a damaged gzip stream",
}


@pytest.fixture(scope="module")
def outcomes(make_recipe) -> dict[str, object]:
    command = [sys.executable, "-c", SCRIPT, make_recipe(backend="huggingface").model_dump_json()]
    single = {"MALLOC_ARENA_MAX": "1", "RAYON_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    environment = {**os.environ, **single}  # the addresses that threads reserve depend on the machine's cores
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2], env=environment
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("case", OUTCOMES)
def test_hostile_bytes_cost_bounded_memory_and_harm_no_other_row(outcomes: dict[str, object], case: str) -> None:
    found, expected = outcomes[case], OUTCOMES[case]
    if isinstance(expected, str):
        assert str(found).startswith(expected)
    else:
        assert found == expected
