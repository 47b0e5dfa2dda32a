"""The same files through `dflash tokenize` and through a Dagster backfill: what the UI's way costs on top.

    python benchmarks/backfill.py --tokenizer DIR --json OUT [--files 1805] [--rows 2] [--work DIR] [--pages]

With two rows a file the work is next to nothing and the overhead is all there is; with 500 it is the real corpus (20 GB
of free disk). Daemon, webserver and code server are the real ones, on an instance of their own; `--pages` opens the
pages people open in Chromium and times the GraphQL answers behind them.
"""

# ruff: noqa: E402 - the folder holds a tokenize.py, which must not hide the standard library's: it leaves the path
import sys
from os.path import dirname

sys.path[0] = dirname(dirname(__file__)) if __name__ == "__main__" else sys.path[0]

import argparse
import json
import os
import platform
import resource
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import chdir, suppress
from datetime import UTC, datetime
from pathlib import Path

import psutil

from benchmarks.corpus import write_corpus
from benchmarks.full_scale import FILES, ROOT, as_toml, check_space, finish, report, start, upload, workspace_of
from dflash_assets.dev import dagster_ui, local_instance
from dflash_assets.graphql import Dagster
from dflash_assets.partitions import sync_partitions
from dflash_core.storage.embedded import embedded_store, ensure_bucket
from dflash_core.workspace import Workspace

ASSETS = ("raw_completions", "tokenized_shards", "loss_mask_stats")
TIMEOUT_S = 3600.0
SAMPLE_S = 1.0
ROLES = {"webserver": "dagster_webserver", "daemon": "dagster._daemon", "code server": "grpc"}
PAGES = {
    "partitions": "/assets/tokenized_shards?view=partitions",
    "one partition": "/assets/loss_mask_stats?view=partitions&partition=part-00700",
    "asset graph": "/asset-groups",
    "backfills": "/overview/backfills",
    "runs": "/runs",
}
BARS = {
    "overhead_s": 240.0,
    "overhead_of_valid_s": 240.0,
    "database_bytes_a_partition": 60e3,
    "database_bytes_a_partition_again": 60e3,
    "webserver_growth": 1.15,
    "daemon_growth": 1.15,
    "code server_growth": 1.15,
}
PAGE_BAR_S = 2.0
PAGE_S = 8.0
"""How long a page is watched: the graph's health comes with later requests."""


class Residents(threading.Thread):
    """Samples what Dagster's long-lived processes hold, by role."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.samples: dict[str, list[float]] = {role: [] for role in ROLES}
        """Resident MB."""

    def run(self) -> None:
        """As long as this process lives."""
        while True:
            for role, process in dagster_processes():
                with suppress(psutil.NoSuchProcess):
                    self.samples[role].append(process.memory_info().rss / 1e6)
            time.sleep(SAMPLE_S)

    def growth(self) -> dict[str, float]:
        """MB of each role a tenth into what was sampled, and the most after that."""
        found: dict[str, float] = {}
        for role, samples in self.samples.items():
            early = len(samples) // 10
            found[f"{role}_mb_early"] = max(samples[: early + 1])
            found[f"{role}_mb_peak_after"] = max(samples[early:])
            found[f"{role}_growth"] = found[f"{role}_mb_peak_after"] / found[f"{role}_mb_early"]
        return found


def tokenized(workspace: Workspace, work: Path) -> tuple[float, float]:
    """Seconds and CPU-seconds of one `dflash tokenize`."""
    began, cpu = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    finish(start(workspace, work))
    wall, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - cpu.ru_utime - cpu.ru_stime


def cpu_of_dagster() -> float:
    """CPU-seconds of daemon, webserver and code server so far, with all runs that have ended."""
    return sum(sum(process.cpu_times()[:4]) for _, process in dagster_processes())


def dagster_processes() -> Iterator[tuple[str, psutil.Process]]:
    """Dagster's long-lived processes below this one, by role; runs come and go beneath the code server."""
    for child in psutil.Process().children(recursive=True):
        try:
            line = " ".join(child.cmdline())
        except psutil.NoSuchProcess:
            continue
        for role, mark in ROLES.items():
            if mark in line and "execute_run" not in line and "sh -c" not in line:
                yield role, child


def backfilled(ui: Dagster, partitions: list[str]) -> tuple[float, float, int]:
    """Seconds, CPU-seconds and runs of one backfill of everything."""
    began, cpu = time.monotonic(), cpu_of_dagster()
    runs = ui.wait_for_backfill(ui.backfill(ASSETS, partitions), TIMEOUT_S, lambda: None)
    wall = time.monotonic() - began
    time.sleep(SAMPLE_S)  # the last run is waited for by then
    cpu = cpu_of_dagster() - cpu
    for run in runs:
        if not run.succeeded:
            sys.exit(f"run {run.run} failed: {run.reason}")
    _, materialized, failed = ui.partitions(ASSETS[-1])
    if (materialized, failed) != (len(partitions), 0):
        sys.exit(f"{materialized} of {len(partitions)} partitions are materialized, {failed} failed")
    return wall, cpu, len(runs)


def database_bytes(home: Path) -> int:
    """Of everything Dagster keeps, its runs' captured output left out."""
    files = (path for path in home.rglob("*") if path.is_file() and "compute_logs" not in path.parts)
    return sum(path.stat().st_size for path in files)


def pages(url: str) -> dict[str, float]:
    """Seconds to the slowest GraphQL answer behind each page, as the UI itself asks for it."""
    from playwright.sync_api import Request, sync_playwright

    found: dict[str, float] = {}
    with sync_playwright() as playwright:
        executable = shutil.which("chromium") or sys.exit("no Chromium on this machine; `make browser` installs it")
        browser = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox", "--disable-gpu"])
        for name, path in PAGES.items():
            page = browser.new_page(viewport={"width": 1600, "height": 1000})
            slowest: dict[str, float] = {}

            def note(request: Request, slowest: dict[str, float] = slowest) -> None:
                if request.url.endswith("/graphql") or "/graphql?" in request.url:
                    asked = json.loads(request.post_data or "{}").get("operationName", "?")
                    slowest[asked] = max(slowest.get(asked, 0.0), request.timing["responseEnd"] / 1e3)

            page.on("requestfinished", note)
            page.goto(url + path)
            page.wait_for_timeout(1e3 * PAGE_S)
            page.close()
            found |= {f"page, {name}: {asked}": took for asked, took in slowest.items() if took > 0.5}
            found[f"page, {name}, slowest answer_s"] = max(slowest.values())
        browser.close()
    return found


def through_dagster(workspace: Workspace, folder: Path, look: bool) -> dict[str, float]:
    """All numbers of the UI's way; `folder` becomes a project of its own."""
    for name in ("dagster.yaml", "workspace.yaml"):
        shutil.copy(ROOT / name, folder / name)
    (folder / "recipe.toml").write_text(as_toml(workspace.recipe), encoding="utf8")
    with chdir(folder), dagster_ui(Path("recipe.toml"), 0, workspace.access, folder / "dagster.log") as ui:
        ui.wait_until_loaded()
        synced = sync_partitions(local_instance(), workspace)
        partitions = [source.partition for source in synced.sources]
        home = folder / ".dflash/dagster"
        before = database_bytes(home)
        residents = Residents()
        residents.start()
        first, cpu, runs = backfilled(ui, partitions)
        after = database_bytes(home)
        again, cpu_again, _ = backfilled(ui, partitions)
        return {
            "backfill_s": first,
            "backfill_cpu_s": cpu,
            "runs": runs,
            "backfill_of_valid_s": again,
            "backfill_of_valid_cpu_s": cpu_again,
            "database_bytes_a_partition": (after - before) / len(partitions),
            "database_bytes_a_partition_again": (database_bytes(home) - after) / len(partitions),
            **residents.growth(),
            **(pages(ui.url) if look else {}),
        }


def missed(numbers: Mapping[str, object]) -> Iterator[str]:
    """A sentence for each bar that these numbers miss."""
    for name, value in numbers.items():
        bar = BARS.get(name, PAGE_BAR_S if name.endswith("slowest answer_s") else None)
        if bar is not None and value > bar:  # type: ignore[operator]
            yield f"{name} is {value:.2f}, at most {bar:g} wanted"


def measure(arguments: argparse.Namespace, work: Path) -> dict[str, object]:
    """All numbers."""
    made = write_corpus(work / "corpus", arguments.files, arguments.rows)
    with embedded_store(work / "store") as access:
        tokenizer = arguments.tokenizer.resolve()
        terminal, dagster = (workspace_of(tokenizer, f"{name}/", access) for name in ("terminal", "dagster"))
        ensure_bucket(terminal.recipe.storage.bucket, access)
        upload(work / "corpus", terminal.source)
        (wall, cpu), (wall_again, cpu_again) = (tokenized(terminal, work) for _ in range(2))
        (work / "project").mkdir()
        through_ui = through_dagster(dagster, work / "project", arguments.pages)
    return {
        "files": arguments.files,
        "source_bytes": made,
        "tokenize_s": wall,
        "tokenize_cpu_s": cpu,
        "tokenize_of_valid_s": wall_again,
        **through_ui,
        "overhead_s": through_ui["backfill_s"] - wall,
        "overhead_cpu_s": through_ui["backfill_cpu_s"] - cpu,
        "overhead_of_valid_s": through_ui["backfill_of_valid_s"] - wall_again,
        "overhead_of_valid_cpu_s": through_ui["backfill_of_valid_cpu_s"] - cpu_again,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "date": datetime.now(UTC).date().isoformat(),
    }


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, required=True, help="a tokenizer folder")
    parser.add_argument("--json", type=Path, required=True, help="where the numbers go")
    parser.add_argument("--files", type=int, default=FILES)
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()), help="a folder on a roomy disk")
    parser.add_argument("--pages", action="store_true", help="also time the pages, in Chromium")
    arguments = parser.parse_args()
    check_space(arguments.work, arguments.files, arguments.rows)
    with tempfile.TemporaryDirectory(dir=arguments.work) as work:
        numbers = measure(arguments, Path(work))
    report(numbers, arguments.json)
    problems = list(missed(numbers))
    if problems:
        sys.exit("\n".join(problems))


if __name__ == "__main__":
    main()
