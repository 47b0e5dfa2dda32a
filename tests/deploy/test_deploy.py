"""The production configuration in deploy/: a code server, webserver and daemon on PostgreSQL, logs in S3."""

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import chdir
from pathlib import Path

import dagster as dg
import pytest

from dflash_assets.dev import dagster_ui
from dflash_assets.graphql import Dagster
from dflash_assets.partitions import completion_files, sync_partitions
from dflash_core.processes import free_ports, running_server
from dflash_core.recipe import StorageSettings
from dflash_core.storage.embedded import ensure_bucket
from dflash_core.storage.s3 import Access, Store, make_client
from dflash_core.workspace import Workspace
from tests.dflash_assets.conftest import recipe, recipe_file, rows, workspace
from tests.postgres import postgres, query

pytestmark = [pytest.mark.services, pytest.mark.timeout(600)]

__all__ = ["recipe", "recipe_file", "rows", "workspace"]

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
LOGS_BUCKET = "deploy-logs"
ASSETS = ("raw_completions", "tokenized_shards", "loss_mask_stats")
PARTITIONS = ("a", "b")
LOGS_TIMEOUT_S = 60.0


@pytest.fixture
def database(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    with postgres() as variables:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        yield variables


@pytest.fixture
def home(tmp_path: Path, access: Access, database: object, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A DAGSTER_HOME that holds what is in deploy/ and nothing else."""
    folder = tmp_path / "home"
    folder.mkdir()
    for name in ("dagster.yaml", "workspace.yaml"):
        shutil.copy(DEPLOY / name, folder / name)
    ensure_bucket(LOGS_BUCKET, access)
    for name, value in {
        "DFLASH_LOGS_BUCKET": LOGS_BUCKET,
        "DFLASH_CODE_HOST": "127.0.0.1",
        "DFLASH_CODE_PORT": str(free_ports(1)[0]),
        "DAGSTER_HOME": str(folder),
    }.items():
        monkeypatch.setenv(name, value)
    return folder


@pytest.fixture
def ui(home: Path, recipe_file: Path, access: Access, monkeypatch: pytest.MonkeyPatch) -> Iterator[Dagster]:
    """The three processes."""
    monkeypatch.setenv("DFLASH_RECIPE", str(recipe_file))
    address = ["-h", os.environ["DFLASH_CODE_HOST"], "-p", os.environ["DFLASH_CODE_PORT"]]
    code = [sys.executable, "-m", "dagster", "code-server", "start", "-m", "dflash_assets.definitions", *address]
    with (
        chdir(home),
        running_server(code, "INT", 10.0, home / "code.log"),
        dagster_ui(recipe_file, 0, access, home / "dagster.log") as running,
    ):
        running.wait_until_loaded()
        yield running


def test_a_run_leaves_its_events_in_postgresql_and_its_logs_in_s3(
    ui: Dagster, home: Path, workspace: Workspace, rows: Callable[[int, str], bytes], database: dict[str, str]
) -> None:
    for name in PARTITIONS:
        workspace.source.put(f"{name}.jsonl", rows(5, name))
    workspace.source.put("bad.jsonl", b"not json at all\n")
    instance = dg.DagsterInstance.from_config(str(home))
    sync_partitions(instance, workspace)

    ends = [ui.wait_for_run(ui.materialize(ASSETS, partition), 120.0) for partition in (*PARTITIONS, "bad")]

    assert [end.succeeded for end in ends] == [True, True, False]
    assert "bad" in ends[-1].reason
    statuses = instance.get_status_by_partition(
        dg.AssetKey("tokenized_shards"), instance.get_dynamic_partitions("completion_files"), completion_files
    )
    assert {name: status.name for name, status in (statuses or {}).items() if status} == {
        "a": "MATERIALIZED",
        "b": "MATERIALIZED",
        "bad": "FAILED",
    }
    materialized = "select count(*) from event_logs where dagster_event_type = 'ASSET_MATERIALIZATION'"
    assert query(database, materialized) == [(len(ASSETS) * len(PARTITIONS),)]
    assert not [path for path in home.rglob("*.db") if path.is_file()]

    logs = Store(make_client(StorageSettings(bucket=LOGS_BUCKET)), LOGS_BUCKET, "dagster/")
    deadline = time.monotonic() + LOGS_TIMEOUT_S
    while not all(any(end.run in key for key, _, _ in logs.list()) for end in ends):
        assert time.monotonic() < deadline, list(logs.list())
        time.sleep(1)
    (key,) = (key for key, _, _ in logs.list() if ends[-1].run in key and key.endswith(".err"))
    assert b"bad" in logs.get(key).body
