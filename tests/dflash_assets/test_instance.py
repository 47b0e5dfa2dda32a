"""The dagster.yaml at the root behaves as it promises: what each of its lines is for."""

import shutil
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path

import dagster as dg
import pytest
import yaml
from dagster._core.scheduler.instigation import InstigatorType

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture
def local(tmp_path: Path) -> Iterator[dg.DagsterInstance]:
    """The instance of a fresh clone."""
    shutil.copy(REPOSITORY / "dagster.yaml", tmp_path)
    with chdir(tmp_path), dg.DagsterInstance.from_config(str(tmp_path)) as instance:
        yield instance


def test_state_lies_below_dflash_and_nowhere_else(local: dg.DagsterInstance, tmp_path: Path) -> None:
    local.add_dynamic_partitions("completion_files", ["a"])
    assert {path.name for path in tmp_path.iterdir()} <= {"dagster.yaml", ".dflash"}
    assert (tmp_path / ".dflash/dagster").is_dir()
    assert not local.telemetry_enabled


def test_runs_wait_for_their_pool_and_start_at_once(local: dg.DagsterInstance) -> None:
    settings = local.get_concurrency_config()
    assert settings.pool_config.pool_granularity is not None
    assert settings.pool_config.pool_granularity.value == "run"
    assert settings.pool_config.default_pool_limit == 1
    assert type(local.run_coordinator).__name__ == "QueuedRunCoordinator"
    assert local.run_coordinator.dequeue_interval_seconds == 1


def test_dead_runs_free_their_slot_and_only_crashes_are_retried(local: dg.DagsterInstance) -> None:
    assert local.run_monitoring_enabled
    assert local.run_monitoring_settings["free_slots_after_run_end_seconds"] == 10
    assert local.run_monitoring_cancel_timeout_seconds >= 120, "training saves a checkpoint first"
    assert local.run_retries_enabled
    assert not local.run_retries_retry_on_asset_or_op_failure
    assert local.run_retries_max_retries == 2


def test_ticks_are_forgotten(local: dg.DagsterInstance) -> None:
    sensor = {status.value: days for status, days in local.get_tick_retention_settings(InstigatorType.SENSOR).items()}
    assert sensor["SKIPPED"] == 1, "a sensor skips once a minute"
    assert 0 < sensor["SUCCESS"] <= 30
    schedule = local.get_tick_retention_settings(InstigatorType.SCHEDULE)
    assert {days for status, days in schedule.items() if status.value == "SUCCESS"} == {30}


def test_the_workspace_names_the_code_location() -> None:
    (entry,) = yaml.safe_load((REPOSITORY / "workspace.yaml").read_text())["load_from"]
    assert entry["python_module"] == {"module_name": "dflash_assets.definitions", "location_name": "dflash"}
