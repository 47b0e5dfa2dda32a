"""Through the running daemon: partial failure, killed runs, new files, reruns, and training in the GPU's pool.

One project for all of it, so the order of the tests is the story.
"""

import json
import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, chdir
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import dagster as dg
import psutil
import pytest

from dflash_assets.dev import SCHEDULES, SENSORS, dagster_ui, local_instance, switch_on
from dflash_assets.graphql import REPOSITORY as SELECTOR
from dflash_assets.graphql import RUN, Dagster
from dflash_assets.partitions import sync_partitions
from dflash_core.storage.layout import RUNS
from dflash_core.storage.partitions import partition_key
from dflash_core.training_set.freeze import load_training_set
from dflash_core.workspace import Workspace, open_workspace

pytestmark = [pytest.mark.services, pytest.mark.timeout(600)]

REPOSITORY = Path(__file__).resolve().parents[2]
FILES, BAD = 100, {"part-017", "part-018", "part-063"}
FILE_ASSETS = ("raw_completions", "tokenized_shards", "loss_mask_stats")
RECIPE = Path("recipe.toml")
PATIENCE_S = 240.0
STATUSES = """query($key: AssetKeyInput!) { assetNodeOrError(assetKey: $key) { __typename ... on AssetNode {
  assetPartitionStatuses { ... on DefaultPartitionStatuses { failedPartitions unmaterializedPartitions } } } } }"""


def completions(name: str, count: int = 4) -> bytes:
    """Rows of which no two are alike."""
    rows = [
        {
            "id": f"{name}-{number}",
            "messages": [
                {"role": "user", "content": f"How many plums are in basket {number} of {name}?"},
                {"role": "assistant", "content": f"Basket {number} of {name} has {number} plums. " * (2 + number % 5)},
            ],
            "finish_reason": "stop",
        }
        for number in range(count)
    ]
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


class Webhook(ThreadingHTTPServer):
    """A local server that keeps what it is told."""

    told: list[dict[str, Any]]


@pytest.fixture(scope="module")
def webhook() -> Iterator[Webhook]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            server.told.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    server = Webhook(("127.0.0.1", 0), Handler)
    server.told = []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory, webhook: Webhook) -> Iterator[Workspace]:
    """A project in a folder of its own with a hundred small files, three of them unreadable."""
    folder = tmp_path_factory.mktemp("daemon")
    for name in ("dagster.yaml", "workspace.yaml"):
        shutil.copy(REPOSITORY / name, folder / name)
    (folder / RECIPE).write_text(f"""
name = "daemon"
[source]
bucket = "daemon"
prefix = "in/"
[storage]
bucket = "daemon"
prefix = "out/"
embedded_store = ".dflash/store"
[target]
path = "{REPOSITORY}/demo/target"
layers = 2
dtype = "float32"
[tokenization]
workers = 1
min_supervised_tokens = 8
[gate]
max_spike_share = 1.0
max_duplicate_share = 1.0
[drafter]
block_size = 4
num_layers = 1
[training]
epochs = 500
batch_rows = 2
anchors = 4
validate_every_steps = 10000
checkpoint_every_steps = 10000
[automation]
rerun_cron = "* * * * *"
max_attempts = 2
[alerts]
webhook_url = "http://127.0.0.1:{webhook.server_port}/hook"
""")
    with chdir(folder), open_workspace(RECIPE) as opened:
        for number in range(FILES):
            name = f"part-{number:03d}"
            opened.source.put(f"{name}.jsonl", b"" if name in BAD else completions(name))
        yield opened


@pytest.fixture(scope="module")
def stack() -> Iterator[ExitStack]:
    """Closing it stops Dagster, as Ctrl-C in `make dev` does."""
    with ExitStack() as opened:
        yield opened


@pytest.fixture(scope="module")
def ui(workspace: Workspace, stack: ExitStack) -> Dagster:
    sync_partitions(local_instance(), workspace)
    running = stack.enter_context(dagster_ui(RECIPE, 0, workspace.access, Path("dagster.log")))
    running.wait_until_loaded()
    return running


def until(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, f"not in time: {what}"
        time.sleep(0.3)


def failed_and_missing(ui: Dagster, asset: str) -> set[str]:
    """What the dialog selects under that name."""
    found = ui.ask(STATUSES, key={"path": [asset]})["assetNodeOrError"]["assetPartitionStatuses"]
    return {*found["failedPartitions"], *found["unmaterializedPartitions"]}


def status(ui: Dagster, run: str) -> str:
    return str(ui.ask(RUN, id=run)["runOrError"]["status"])


def log(ui: Dagster, run: str) -> str:
    events: list[dict[str, Any]] = ui.ask(RUN, id=run)["runOrError"]["eventConnection"]["events"]
    return "\n".join(event.get("message") or "" for event in events)


def worker(ui: Dagster, run: str) -> psutil.Process:
    """The process that works on a run."""
    found = re.search(r"Executing steps in process \(pid: (\d+)\)|in process \(pid: (\d+)\)", log(ui, run))
    assert found is not None, log(ui, run)
    return psutil.Process(int(found.group(1) or found.group(2)))


def test_three_bad_files_of_a_hundred_fail_alone_and_only_they_are_rerun(
    ui: Dagster, workspace: Workspace, webhook: Webhook
) -> None:
    ui.switch_on(["tell_of_failed_runs"], [])
    ui.backfill(FILE_ASSETS, [f"part-{number:03d}" for number in range(FILES)])
    until(lambda: ui.partitions("loss_mask_stats") == (FILES, 97, 3), "97 green, 3 failed")
    (run,) = local_instance().get_runs()
    told = ui.wait_for_run(run.run_id, PATIENCE_S).reason
    assert told.count("is empty") == len(BAD)
    for name in BAD:
        assert f"{name}: " in told
    for asset in FILE_ASSETS:
        assert ui.partitions(asset) == (FILES, 97, 3)
        assert failed_and_missing(ui, asset) == BAD
        page = dg.AssetRecordsFilter(dg.AssetKey(asset), asset_partitions=["part-063"])
        (record,) = local_instance().fetch_observations(page, limit=10).records
        assert record.asset_observation is not None
        assert "is empty" in str(record.asset_observation.metadata["reason"].value)

    assert ui.wait_for_run(ui.materialize(["training_set"]), PATIENCE_S).succeeded
    frozen = load_training_set(workspace.derived)
    assert (len(frozen.shards), set(frozen.missing), frozen.verdict.passed) == (97, BAD, True)
    until(lambda: bool(webhook.told), "the webhook")
    assert set(webhook.told[0]["failed"]) == BAD

    for name in BAD:
        workspace.source.put(f"{name}.jsonl", completions(name))
    before = ui.last_materialization("tokenized_shards", "part-016")
    ui.backfill(FILE_ASSETS, sorted(failed_and_missing(ui, "tokenized_shards")))
    for asset in FILE_ASSETS:
        until(lambda asset=asset: ui.partitions(asset) == (FILES, FILES, 0), "all green")  # type: ignore[misc]
    assert ui.last_materialization("tokenized_shards", "part-016") == before


def test_what_is_valid_is_skipped_in_milliseconds_and_says_so(ui: Dagster) -> None:
    every = [f"part-{number:03d}" for number in range(40)]
    assert ui.wait_for_run(ui.materialize(FILE_ASSETS, every[0], last=every[-1]), PATIENCE_S).succeeded
    page = dg.AssetRecordsFilter(dg.AssetKey("tokenized_shards"), asset_partitions=every)
    latest = local_instance().fetch_materializations(page, limit=40).records
    events = [record.asset_materialization for record in latest]
    assert all(event is not None and event.metadata["skipped, still valid"].value for event in events)
    seconds = sorted(float(event.metadata["seconds"].value) for event in events if event is not None)  # type: ignore[arg-type]
    print(f"skipping a valid key: median {seconds[20] * 1000:.0f} ms")
    assert seconds[20] < 5, "milliseconds on an idle machine"


def test_a_killed_run_keeps_what_it_finished_and_is_tried_again(ui: Dagster, workspace: Workspace) -> None:
    names = [f"slow-{number:02d}" for number in range(12)]
    for name in names:
        workspace.source.put(f"{name}.jsonl", completions(name, 4000))
    sync_partitions(local_instance(), workspace)
    running = ui.materialize(FILE_ASSETS, names[0], last=names[-1])
    until(lambda: len(failed_and_missing(ui, "loss_mask_stats")) < 12, "the first file")
    done = set(names) - failed_and_missing(ui, "loss_mask_stats")
    worker(ui, running).kill()
    until(lambda: status(ui, running) == "FAILURE", "the run is seen to be dead")
    kept = set(names) - failed_and_missing(ui, "loss_mask_stats")
    assert done <= kept
    assert len(kept) < len(names), "it was killed half-way"
    until(lambda: failed_and_missing(ui, "loss_mask_stats") == set(), "the retry")
    page = dg.AssetRecordsFilter(dg.AssetKey("tokenized_shards"), asset_partitions=sorted(done))
    latest = local_instance().fetch_materializations(page, limit=len(done)).records
    assert all(r.asset_materialization and r.asset_materialization.metadata["skipped, still valid"] for r in latest)


def test_new_and_hostile_names_go_to_statistics_by_themselves(ui: Dagster, workspace: Workspace) -> None:
    hostile = {name: partition_key(name, "") for name in ("sub/dir, 1 ...jsonl", "Größe 尺寸.jsonl")}
    for name in hostile:
        workspace.source.put(name, completions(name))
    workspace.source.put("part-000.jsonl", completions("changed"))
    workspace.source.put("part-never.jsonl", b"")
    before = ui.last_materialization("tokenized_shards", "part-000")
    ui.switch_on(["new_completion_files"], ["rerun_failed_files"])
    until(lambda: ui.partitions("loss_mask_stats")[0] == FILES + 12 + 3, "new partitions")
    until(lambda: failed_and_missing(ui, "loss_mask_stats") == {"part-never"}, "new files")
    until(lambda: ui.last_materialization("tokenized_shards", "part-000") != before, "the changed file")
    for key in hostile.values():
        assert ui.last_materialization("loss_mask_stats", key) is not None, key


def test_training_waits_streams_saves_and_continues(ui: Dagster, workspace: Workspace) -> None:
    assert ui.wait_for_run(ui.materialize(["training_set"]), PATIENCE_S).succeeded
    first = ui.materialize(["drafter_checkpoint"])
    until(lambda: re.search(r"step \d+/\d+, loss .* left", log(ui, first)) is not None, "steps in the run's log")
    second = ui.materialize(["drafter_checkpoint"])
    time.sleep(3)
    assert status(ui, second) == "QUEUED"

    processes = worker(ui, first).children(recursive=True)
    assert processes
    ui.terminate([first])
    until(lambda: status(ui, first) == "CANCELED", "termination")
    psutil.wait_procs(processes, timeout=60)
    assert not [process for process in processes if process.is_running()]
    assert [key for key, _, _ in workspace.derived.list(RUNS) if key.endswith(".json")], "no checkpoint"

    page = dg.AssetRecordsFilter(dg.AssetKey("drafter_checkpoint"))
    (point, *_) = local_instance().fetch_observations(page, limit=10).records
    assert point.asset_observation is not None
    assert {"step", "train loss", "train accepted prefix", "seconds left"} <= set(point.asset_observation.metadata)

    until(lambda: re.search(r"step (\d+)/", log(ui, second)) is not None, "the second run has the slot")
    step = re.search(r"step (\d+)/", log(ui, second))
    assert step is not None
    assert int(step.group(1)) > 1, "it continues"
    (trainer,) = [process for process in worker(ui, second).children() if "_run_child" in " ".join(process.cmdline())]
    os.kill(trainer.pid, signal.SIGKILL)
    end = ui.wait_for_run(second, PATIENCE_S)
    assert not end.succeeded
    assert "killed by SIGKILL" in end.reason
    assert "step" in end.reason, "its last lines"


def test_a_failed_file_was_tried_again_and_then_quarantined(ui: Dagster) -> None:
    page = dg.AssetRecordsFilter(dg.AssetKey("raw_completions"), asset_partitions=["part-never"])

    def states() -> list[object]:
        found = local_instance().fetch_observations(page, limit=20, ascending=True).records
        return [r.asset_observation.metadata["state"].value for r in found if r.asset_observation is not None]

    until(lambda: states() == ["failed", "asked for again", "failed"], "the rerun")
    key = dg.AssetCheckKey(dg.AssetKey("raw_completions"), "nothing_quarantined")

    def verdict() -> str:
        found = local_instance().event_log_storage.get_latest_asset_check_execution_by_key([key])
        return found[key].status.value if key in found else ""

    until(lambda: verdict() == "FAILED", "the quarantine")
    assert states() == ["failed", "asked for again", "failed"], "tried no more"


def test_make_dev_switches_on_what_nobody_has_touched(ui: Dagster) -> None:
    def states() -> dict[str, str]:
        return {state.name: state.status.value for state in local_instance().all_instigator_state()}

    switch_on(ui)
    assert states() == dict.fromkeys((*SENSORS, *SCHEDULES), "RUNNING")
    sensor = ui.ask(
        "query($selector: SensorSelector!) { sensorOrError(sensorSelector: $selector) { ... on Sensor { id } } }",
        selector={**SELECTOR, "sensorName": "nightly_stages"},
    )["sensorOrError"]["id"]
    ui.ask("mutation($id: String!) { stopSensor(id: $id) { __typename } }", id=sensor)
    switch_on(ui)
    assert states()["nightly_stages"] == "STOPPED", "somebody's own choice stays"


def test_stopping_waits_for_the_checkpoint(ui: Dagster, stack: ExitStack, workspace: Workspace) -> None:
    run = ui.materialize(["drafter_checkpoint"])
    until(lambda: re.search(r"step \d+/", log(ui, run)) is not None, "training")
    saved = {key for key, _, _ in workspace.derived.list(RUNS)}
    stack.close()
    ended = local_instance().get_run_by_id(run)
    assert ended is not None
    assert ended.status == dg.DagsterRunStatus.CANCELED
    assert {key for key, _, _ in workspace.derived.list(RUNS)} - saved, "a newer checkpoint"
