"""The whole corpus at its real size through `dflash tokenize`: time, memory, and a run that is killed at half.

    python benchmarks/full_scale.py --tokenizer DIR --json OUT [--files 1805] [--rows 500] [--work DIR]

Makes the files (`corpus.py`), puts them into the embedded store, tokenizes all once without a break and once more under
another prefix with SIGKILL at half; both have to end in the same bytes. Needs 20 GB of free disk at full size.
"""

# ruff: noqa: E402 - the folder holds a tokenize.py, which must not hide the standard library's: it leaves the path
import sys
from os.path import dirname

sys.path[0] = dirname(dirname(__file__)) if __name__ == "__main__" else sys.path[0]

import argparse
import json
import os
import platform
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

import psutil

from benchmarks.corpus import ROWS, write_corpus
from dflash_core.recipe import Recipe, Source, Storage, Target, Tokenization
from dflash_core.records import ShardManifest
from dflash_core.storage.embedded import embedded_store, ensure_bucket
from dflash_core.storage.store import Store, list_sources, open_stores

FILES = 1805
BYTES_A_ROW = 22_000
"""Of disk: the text here, in the store and compressed as shards, twice, with room to breathe."""
BUCKET = "full-scale"
ROOT = Path(__file__).resolve().parent.parent
SAMPLE_S = 0.5


def recipe(tokenizer: Path, prefix: str) -> Recipe:
    """As in production, but for the name of the bucket."""
    return Recipe(
        name="full-scale",
        source=Source(bucket=BUCKET, prefix="completions/"),
        storage=Storage(bucket=BUCKET, prefix=prefix),
        target=Target(path=tokenizer),
        tokenization=Tokenization(),
    )


def as_toml(settings: Recipe) -> str:
    """The few tables that differ from the defaults."""
    return (
        f'name = "{settings.name}"\n[source]\nbucket = "{BUCKET}"\nprefix = "{settings.source.prefix}"\n'
        f'[storage]\nbucket = "{BUCKET}"\nprefix = "{settings.storage.prefix}"\n'
        f'[target]\npath = "{settings.target.path}"\n'
    )


class Memory(threading.Thread):
    """Samples what a process and its descendants hold together."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._pid = pid
        self.samples: list[tuple[float, int]] = []
        """(seconds, resident bytes)."""

    def run(self) -> None:
        """Until the process has ended."""
        began = time.monotonic()
        while True:
            try:
                process = psutil.Process(self._pid)
                family = [process, *process.children(recursive=True)]
                resident = sum(member.memory_info().rss for member in family)
            except psutil.NoSuchProcess:
                if not psutil.pid_exists(self._pid):
                    return
                continue
            if resident:  # a process that has ended and was not waited for yet holds nothing
                self.samples.append((time.monotonic() - began, resident))
            time.sleep(SAMPLE_S)


def start(settings: Recipe, work: Path) -> subprocess.Popen[bytes]:
    """`dflash tokenize` in a process of its own."""
    path = work / f"{settings.storage.prefix.strip('/')}.toml"
    path.write_text(as_toml(settings), encoding="utf8")
    command = [sys.executable, "-m", "dflash_core.cli", "tokenize", "--recipe", str(path)]
    return subprocess.Popen(command, cwd=ROOT, start_new_session=True)


def finish(process: subprocess.Popen[bytes]) -> None:
    """Wait for it to succeed."""
    if process.wait():
        sys.exit(f"dflash tokenize ended with {process.returncode}; see its output above")


def manifests(derived: Store) -> int:
    """Files done so far."""
    keys = (key for key, _, _ in derived.list("tokenized_shards/"))
    return sum(key.endswith(".json") for key in keys)


def uninterrupted(settings: Recipe, work: Path, files: int) -> dict[str, float]:
    """Wall time and memory of one run."""
    began = time.monotonic()
    process = start(settings, work)
    memory = Memory(process.pid)
    memory.start()
    derived = open_stores(settings).derived
    at_100 = None
    while process.poll() is None:
        time.sleep(2.0)
        if at_100 is None and manifests(derived) >= min(100, files // 4):
            at_100 = len(memory.samples)
    finish(process)
    wall = time.monotonic() - began
    resident = [amount / 1e6 for _, amount in memory.samples]
    since = resident[at_100 or 0 :] or resident[-1:]
    return {
        "wall_s": wall,
        "peak_resident_mb": max(resident),
        "resident_mb_at_100th_file": since[0],
        "peak_resident_mb_after_100th_file": max(since),
    }


def killed_at_half(settings: Recipe, work: Path, files: int) -> dict[str, float]:
    """SIGKILL at half, then the same command: what was done is not done again."""
    derived = open_stores(settings).derived
    process = start(settings, work)
    while manifests(derived) < files // 2 and process.poll() is None:
        time.sleep(0.5)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    time.sleep(3.0)  # the workers notice within a second
    before = {key: etag for key, _, etag in derived.list() if key.endswith(".json")}
    modified = _modified(derived)
    began = time.monotonic()
    finish(start(settings, work))
    wall = time.monotonic() - began
    again = _modified(derived)
    redone = sum(again[key] != modified[key] for key in before)
    return {"killed_at_files": len(before) / 2, "resumed_wall_s": wall, "objects_written_again": redone}


def _modified(derived: Store) -> dict[str, datetime]:
    pages = derived.client.get_paginator("list_objects_v2").paginate(Bucket=derived.bucket, Prefix=derived.prefix)
    return {
        o["Key"].removeprefix(derived.prefix): o["LastModified"] for page in pages for o in page.get("Contents", [])
    }


def totals(derived: Store) -> dict[str, int]:
    """Rows and tokens over all manifests."""
    keys = [key for key, _, _ in derived.list("tokenized_shards/") if key.endswith(".json")]
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda key: derived.get_record(key, ShardManifest), keys))
    return {
        "files": len(found),
        "rows_read": sum(m.rows_read for m in found),
        "rows_kept": sum(m.rows_kept for m in found),
        "rows_rejected": sum(m.rows_rejected for m in found),
        "tokens": sum(m.tokens for m in found),
    }


def measure(tokenizer: Path, files: int, rows: int, work: Path) -> dict[str, object]:
    """All numbers."""
    made = write_corpus(work / "corpus", files, rows)
    with embedded_store(work / "store"):
        ensure_bucket(BUCKET)
        first, second = (recipe(tokenizer.resolve(), f"{name}/") for name in ("whole", "killed"))
        stores = open_stores(first)
        with ThreadPoolExecutor(8) as pool:
            paths = sorted((work / "corpus").iterdir())
            list(pool.map(lambda path: stores.source.put(path.name, path.read_bytes()), paths))
        shutil.rmtree(work / "corpus")
        if len(list_sources(stores.source)) != files:
            sys.exit("the store does not list what was put into it")
        whole = uninterrupted(first, work, files)
        killed = killed_at_half(second, work, files)
        objects = [{k: (size, etag) for k, size, etag in open_stores(s).derived.list()} for s in (first, second)]
        return {
            **totals(stores.derived),
            "source_bytes": made,
            **whole,
            **killed,
            "byte_equal": objects[0] == objects[1],
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
            "date": datetime.now(UTC).date().isoformat(),
        }


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, required=True, help="a tokenizer folder")
    parser.add_argument("--json", type=Path, required=True, help="where the numbers go")
    parser.add_argument("--files", type=int, default=FILES)
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()), help="a folder on a roomy disk")
    arguments = parser.parse_args()
    needed = arguments.files * arguments.rows * BYTES_A_ROW
    free = shutil.disk_usage(arguments.work).free
    if free < needed:
        sys.exit(f"{arguments.work} has {free >> 30} GB free, this needs {(needed >> 30) + 1}; give another --work")
    with tempfile.TemporaryDirectory(dir=arguments.work) as work:
        numbers = measure(arguments.tokenizer, arguments.files, arguments.rows, Path(work))
    for name, value in numbers.items():
        print(f"{name:34} {value:.1f}" if isinstance(value, float) else f"{name:34} {value}")
    arguments.json.write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf8")
    if not numbers["byte_equal"] or numbers["objects_written_again"]:
        sys.exit("the killed run did not end as the whole one, or did again what was done")


if __name__ == "__main__":
    main()
