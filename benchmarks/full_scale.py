"""The whole corpus at its real size through `dflash tokenize`: time, memory, and a run that is killed at half.

    python benchmarks/full_scale.py --tokenizer DIR --json OUT [--files 1805] [--rows 500] [--work DIR]
                                    [--like DIR] [--full JSON]

Makes the files (`corpus.py`), puts them into the embedded store, tokenizes all once without a break and once more under
another prefix with SIGKILL at half; both have to end in the same bytes. Needs 20 GB of free disk at full size. `--like`
compares the speed on the generated files with that on the files of a folder; `--full` takes the numbers of a whole run
and says, beside `--files 181`, whether time and memory are linear in rows. A bar that is missed is named, with exit
code 1.
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
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

import psutil

from benchmarks.corpus import ROWS, write_corpus
from benchmarks.tokenize import rate, recipe, tokenize_files
from dflash_core.recipe import Recipe, TokenizationSettings
from dflash_core.records import ShardManifest
from dflash_core.shards.tokenize_file import FileTokenizer
from dflash_core.storage.embedded import embedded_store, ensure_bucket
from dflash_core.storage.partitions import list_sources
from dflash_core.storage.s3 import Access, Store
from dflash_core.workspace import Workspace, connect

FILES, LAST_ROWS = 1805, 87
"""1,804 files of 500 rows and one of 87: 902,087 rows."""
LIKE_FILES = 6
BYTES_A_ROW = 22_000
"""Of disk: the text here, in the store and compressed as shards, twice, with room to breathe."""
ROOT = Path(__file__).resolve().parent.parent
SAMPLE_S = 0.5

MAX_WALL_S = 240.0
MAX_RESIDENT_MB = 1500.0
FLAT = 1.1
"""Times what is resident at the 100th file."""
LINEAR = 1.15
ALIKE = 0.15

Numbers = dict[str, float]


def workspace_of(tokenizer: Path, prefix: str, access: Access) -> Workspace:
    """As in production, but for the name of the bucket."""
    given = recipe(tokenizer)
    storage = given.storage.model_copy(update={"prefix": prefix})
    settings = given.model_copy(update={"storage": storage, "tokenization": TokenizationSettings()})
    return connect(settings, access)


def as_toml(settings: Recipe) -> str:
    """The few tables that differ from the defaults."""
    return (
        f'name = "{settings.name}"\n[source]\n'
        f'bucket = "{settings.source.bucket}"\nprefix = "{settings.source.prefix}"\n'
        f'[storage]\nbucket = "{settings.storage.bucket}"\nprefix = "{settings.storage.prefix}"\n'
        f'[target]\npath = "{settings.target.path}"\n'
    )


class Memory(threading.Thread):
    """Samples what a process and its descendants hold together.

    Twice: with the pages that they share counted for each of them (resident), and once in all (held).
    """

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._pid = pid
        self.samples: list[int] = []
        """Resident bytes."""
        self.held = 0
        """The most bytes at any time (PSS)."""

    def run(self) -> None:
        """Until the process has ended."""
        while psutil.pid_exists(self._pid):
            try:
                process = psutil.Process(self._pid)
                family = [process, *process.children(recursive=True)]
                memory = [member.memory_full_info() for member in family]
            except psutil.NoSuchProcess:
                continue
            if resident := sum(each.rss for each in memory):  # one that ended and was not waited for yet holds nothing
                self.samples.append(resident)
                self.held = max(self.held, sum(each.pss for each in memory))
            time.sleep(SAMPLE_S)


def upload(corpus: Path, source: Store) -> None:
    """Move the files into the store."""
    paths = sorted(corpus.iterdir())
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda path: source.put(path.name, path.read_bytes()), paths))
    if len(list_sources(source)) != len(paths):
        sys.exit("the store does not list what was put into it")
    shutil.rmtree(corpus)


def start(workspace: Workspace, work: Path) -> subprocess.Popen[bytes]:
    """`dflash tokenize` in a process of its own."""
    settings = workspace.recipe
    path = work / f"{settings.storage.prefix.strip('/')}.toml"
    path.write_text(as_toml(settings), encoding="utf8")
    command = [sys.executable, "-m", "dflash_core.cli", "tokenize", "--recipe", str(path)]
    environment = os.environ | workspace.access.environment()
    return subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True)


def finish(process: subprocess.Popen[bytes]) -> None:
    """Wait for it to succeed."""
    if process.wait():
        sys.exit(f"dflash tokenize ended with {process.returncode}; see its output above")


def done(derived: Store) -> set[str]:
    """Partitions that are whole: those with a manifest, which is written last."""
    return {_partition(key) for key, _, _ in derived.list("tokenized_shards/") if key.endswith(".json")}


def _partition(key: str) -> str:
    return key.rsplit("/", 1)[-1].split(".", 1)[0]


def uninterrupted(workspace: Workspace, work: Path, files: int) -> Numbers:
    """Wall time and memory of one run."""
    began = time.monotonic()
    process = start(workspace, work)
    memory = Memory(process.pid)
    memory.start()
    derived = workspace.derived
    at_100 = None
    while process.poll() is None:
        time.sleep(2.0)
        if at_100 is None and len(done(derived)) >= min(100, files // 4):
            at_100 = len(memory.samples)
    finish(process)
    wall = time.monotonic() - began
    resident = [amount / 1e6 for amount in memory.samples]
    since = resident[at_100 or 0 :] or resident[-1:]
    return {
        "wall_s": wall,
        "peak_resident_mb": max(resident),
        "peak_held_mb": memory.held / 1e6,
        "resident_mb_at_100th_file": since[0],
        "peak_resident_mb_after_100th_file": max(since),
    }


def killed_at_half(workspace: Workspace, work: Path, files: int) -> Numbers:
    """SIGKILL at half, then the same command: what was done is not done again."""
    derived = workspace.derived
    process = start(workspace, work)
    while len(done(derived)) < files // 2 and process.poll() is None:
        time.sleep(0.5)
    if process.poll() is not None:
        sys.exit(f"dflash tokenize ended with {process.returncode} before it was at half; see its output above")
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    time.sleep(3.0)  # the workers notice within a second
    before, modified = done(derived), _modified(derived)
    began = time.monotonic()
    finish(start(workspace, work))
    wall = time.monotonic() - began
    again = _modified(derived)
    redone = sum(again[key] != when for key, when in modified.items() if _partition(key) in before)
    return {"killed_at_files": len(before), "resumed_wall_s": wall, "objects_written_again": redone}


def _modified(derived: Store) -> dict[str, datetime]:
    pages = derived.client.get_paginator("list_objects_v2").paginate(Bucket=derived.bucket, Prefix=derived.prefix)
    return {
        o["Key"].removeprefix(derived.prefix): o["LastModified"] for page in pages for o in page.get("Contents", [])
    }


def totals(derived: Store) -> Numbers:
    """Rows and tokens over all manifests."""
    keys = [key for key, _, _ in derived.list("tokenized_shards/") if key.endswith(".json")]
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda key: derived.get_record(key, ShardManifest), keys))
    return {
        "files": len(found),
        "rows_read": sum(m.rows_read for m in found),
        "rows_kept": sum(m.rows_kept for m in found),
        "rows_dropped": sum(m.rows_dropped or 0 for m in found),
        "rows_rejected": sum(m.rows_rejected for m in found),
        "tokens": sum(m.tokens for m in found),
    }


def alike(tokenizer: Path, made: Path, other: Path, work: Path) -> Numbers:
    """Speed on some of the generated files over that on as many others: the generated text is no easier."""
    ours, theirs = (sorted(folder.glob("*.jsonl"))[:LIKE_FILES] for folder in (made, other))
    if len(theirs) < LIKE_FILES:
        sys.exit(f"{other} holds {len(theirs)} *.jsonl files; give a folder of at least {LIKE_FILES}")
    encoder = FileTokenizer(recipe(tokenizer))
    tokenize_files(encoder, [ours[0], theirs[0]], work)
    speeds = [rate(lambda: tokenize_files(encoder, files[1:], work)) for files in (ours, theirs)]  # noqa: B023
    return {
        "generated_mtok_per_cpu_s": speeds[0],
        "like_mtok_per_cpu_s": speeds[1],
        "like_ratio": speeds[0] / speeds[1],
    }


def measure(tokenizer: Path, files: int, rows: int, work: Path, like: Path | None) -> dict[str, object]:
    """All numbers."""
    made = write_corpus(work / "corpus", files, rows, last=LAST_ROWS if (files, rows) == (FILES, ROWS) else None)
    compared = alike(tokenizer, work / "corpus", like, work) if like else {}
    with embedded_store(work / "store") as access:
        first, second = (workspace_of(tokenizer.resolve(), f"{name}/", access) for name in ("whole", "killed"))
        ensure_bucket(first.recipe.storage.bucket, access)
        upload(work / "corpus", first.source)
        whole = uninterrupted(first, work, files)
        killed = killed_at_half(second, work, files)
        objects = [{k: (size, etag) for k, size, etag in w.derived.list()} for w in (first, second)]
        return {
            **totals(first.derived),
            "source_bytes": made,
            **compared,
            **whole,
            **killed,
            "byte_equal": objects[0] == objects[1],
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
            "date": datetime.now(UTC).date().isoformat(),
        }


def against_full(tenth: dict[str, object], full: dict[str, object]) -> Numbers:
    """What a whole run cost, over what this one extrapolates to (1.0: exactly linear, or equally much memory)."""
    rows = full["rows_read"] / tenth["rows_read"]  # type: ignore[operator]
    return {
        "full_wall_over_linear": full["wall_s"] / (tenth["wall_s"] * rows),  # type: ignore[operator]
        "full_peak_over_tenth": full["peak_resident_mb"] / tenth["peak_resident_mb"],  # type: ignore[operator]
    }


def missed(numbers: dict[str, object]) -> Iterator[str]:
    """A sentence for each bar that these numbers miss."""
    flat = numbers["peak_resident_mb_after_100th_file"] / numbers["resident_mb_at_100th_file"]  # type: ignore[operator]
    most = {
        "wall_s": MAX_WALL_S,
        "peak_resident_mb": MAX_RESIDENT_MB,
        "objects_written_again": 0,
        "growth of memory after the 100th file": FLAT,
        "full_wall_over_linear": LINEAR,
        "full_peak_over_tenth": LINEAR,
        "difference in speed from the other files": ALIKE,
    }
    found = {**numbers, "growth of memory after the 100th file": flat}
    if "like_ratio" in numbers:
        found["difference in speed from the other files"] = abs(numbers["like_ratio"] - 1)  # type: ignore[operator]
    for name, bar in most.items():
        if name in found and found[name] > bar:  # type: ignore[operator]
            yield f"{name} is {found[name]:.2f}, at most {bar:g} wanted"
    if not numbers["byte_equal"]:
        yield "the killed run did not end in the bytes of the whole one"


def check_space(work: Path, files: int, rows: int) -> None:
    """Make the folder; rather refuse now than after twenty minutes."""
    work.mkdir(parents=True, exist_ok=True)
    needed, free = files * rows * BYTES_A_ROW, shutil.disk_usage(work).free
    if free < needed:
        sys.exit(f"{work} has {free >> 30} GB free, this needs {(needed >> 30) + 1}; give another --work")


def report(numbers: Mapping[str, object], path: Path) -> None:
    """Print and write."""
    for name, value in numbers.items():
        print(f"{name:34} {value:.2f}" if isinstance(value, float) else f"{name:34} {value}")
    path.write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf8")


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, required=True, help="a tokenizer folder")
    parser.add_argument("--json", type=Path, required=True, help="where the numbers go")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()), help="a folder on a roomy disk")
    parser.add_argument("--files", type=int, default=FILES)
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--full", type=Path, help="the numbers of a whole run, to compare with")
    parser.add_argument("--like", type=Path, help="a folder of other files, whose speed is compared")
    arguments = parser.parse_args()
    check_space(arguments.work, arguments.files, arguments.rows)
    with tempfile.TemporaryDirectory(dir=arguments.work) as work:
        numbers = measure(arguments.tokenizer, arguments.files, arguments.rows, Path(work), arguments.like)
    if arguments.full:
        numbers |= against_full(numbers, json.loads(arguments.full.read_text(encoding="utf8")))
    report(numbers, arguments.json)
    problems = list(missed(numbers))
    if problems:
        sys.exit("\n".join(problems))


if __name__ == "__main__":
    main()
