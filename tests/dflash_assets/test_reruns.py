"""Failed files are tried so often and no more, then listed until released; a night goes on whatever fails."""

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

import dagster as dg
import pytest

from dflash_assets import completion_files, reruns
from dflash_assets.checks import nothing_quarantined
from dflash_assets.definitions import defs
from dflash_assets.partitions import RANGE_END, RANGE_START
from dflash_assets.quarantine import QUARANTINE, FailedFile, failed_files, release, release_files
from dflash_assets.reruns import NIGHT, nightly_stages, schedules
from dflash_assets.resources import RecipeResource
from dflash_core.errors import StorageError, UserError
from dflash_core.recipe import AutomationSettings
from dflash_core.records import SourceFile
from dflash_core.storage.s3 import Store
from dflash_core.training_set.freeze import freeze_training_set
from dflash_core.workspace import Workspace

Materialize = Callable[[Sequence[str]], dg.ExecuteInProcessResult]
Sync = Callable[[], tuple[SourceFile, ...]]
Rows = Callable[..., bytes]
Tick = Callable[[], list[dg.RunRequest]]
MAX_TRIES = 3


@pytest.fixture
def tick(instance: dg.DagsterInstance, resources: dict[str, RecipeResource]) -> Callable[[str], list[dg.RunRequest]]:
    """What a schedule asks for."""
    by_name = {schedule.name: schedule for schedule in schedules(AutomationSettings(max_attempts=MAX_TRIES))}

    def evaluate(name: str) -> list[dg.RunRequest]:
        with dg.build_schedule_context(instance, datetime(2026, 1, 2, 2, tzinfo=UTC), resources) as context:
            asked = by_name[name](context)
        return asked if isinstance(asked, list) else []

    return evaluate


@pytest.fixture
def failed(instance: dg.DagsterInstance, sync: Sync) -> Callable[[], dict[str, FailedFile]]:
    def look() -> dict[str, FailedFile]:
        etags = {source.partition: source.etag for source in sync()}
        return {file.partition: file for file in failed_files(instance, etags, MAX_TRIES)}

    return look


def test_a_failed_file_is_tried_three_times_then_quarantined_until_released_or_replaced(
    instance: dg.DagsterInstance,
    source: Store,
    materialize: Materialize,
    sync: Sync,
    rows: Rows,
    tick: Callable[[str], list[dg.RunRequest]],
    failed: Callable[[], dict[str, FailedFile]],
) -> None:
    source.put("good.jsonl", rows(4, "good"))
    source.put("bad.jsonl", b"not json\n")
    sync()
    assert not materialize(["bad", "good"]).success
    assert list(failed()) == ["bad"]
    assert "invalid JSON" in failed()["bad"].reason
    for tries in (2, 3):
        (request,) = tick("rerun_failed_files")
        assert request.tags[RANGE_START] == "bad"
        assert not materialize(["bad"]).success
        assert failed()["bad"].tries == tries
    assert failed()["bad"].quarantined
    assert tick("rerun_failed_files") == []
    latest = instance.event_log_storage.get_latest_asset_check_execution_by_key(
        [dg.AssetCheckKey(dg.AssetKey("raw_completions"), "nothing_quarantined")]
    )
    assert [execution.status.value for execution in latest.values()] == ["FAILED"]

    release(instance, "bad")
    assert failed()["bad"].tries == 0
    for _ in range(MAX_TRIES):
        assert len(tick("rerun_failed_files")) == 1
        assert not materialize(["bad"]).success
    assert failed()["bad"].quarantined

    source.put("bad.jsonl", b"still not json\n")
    assert not failed()["bad"].quarantined, "another version of the file has tries of its own"
    source.put("bad.jsonl", rows(4, "repaired"))
    assert len(tick("rerun_failed_files")) == 1
    assert materialize(["bad"]).success
    assert failed() == {}


def test_a_file_that_kills_its_run_is_counted_too(
    source: Store,
    materialize: Materialize,
    sync: Sync,
    rows: Rows,
    tick: Callable[[str], list[dg.RunRequest]],
    failed: Callable[[], dict[str, FailedFile]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def die(*arguments: object) -> None:
        raise RuntimeError("no word about the file itself")

    source.put("a.jsonl", rows(4, "a"))
    sync()
    monkeypatch.setattr(completion_files, "tokenize_files", die)
    for _ in range(MAX_TRIES - 1):
        assert not materialize(["a"]).success
        assert len(tick("rerun_failed_files")) == 1
    assert not materialize(["a"]).success
    assert failed()["a"].quarantined
    assert "died" in failed()["a"].reason


@pytest.mark.parametrize("what", ["the target's folder", "the store"])
def test_what_breaks_every_run_is_no_files_fault(
    source: Store,
    materialize: Materialize,
    sync: Sync,
    rows: Rows,
    recipe_file: Path,
    tick: Callable[[str], list[dg.RunRequest]],
    failed: Callable[[], dict[str, FailedFile]],
    monkeypatch: pytest.MonkeyPatch,
    what: str,
) -> None:
    def stop(*arguments: object) -> None:
        raise StorageError("the store refuses to write")

    for name in ("a", "b"):
        source.put(f"{name}.jsonl", rows(4, name))
    source.put("bad.jsonl", b"not json\n")
    sync()
    assert not materialize(["bad"]).success
    right = recipe_file.read_text()
    for _ in range(MAX_TRIES):
        with monkeypatch.context() as patch:
            if what == "the store":
                patch.setattr(completion_files, "tokenize_files", stop)
            else:
                recipe_file.write_text(right.replace("demo/target", "demo/nothing"))
            assert not materialize(["a", "b"]).success
            if what != "the store":
                assert tick("rerun_failed_files") == [], "nothing is asked for that cannot succeed"
        recipe_file.write_text(right)
        assert len(tick("rerun_failed_files")) in (1, 2)
    found = failed()
    assert {name: found[name].quarantined for name in found} == {"a": False, "b": False, "bad": True}
    assert ("refuses to write" if what == "the store" else "demo/nothing") in found["a"].reason


def test_quarantined_files_are_released_by_pattern_or_all(
    instance: dg.DagsterInstance,
    workspace: Workspace,
    source: Store,
    materialize: Materialize,
    sync: Sync,
    rows: Rows,
    tick: Callable[[str], list[dg.RunRequest]],
    failed: Callable[[], dict[str, FailedFile]],
) -> None:
    def held() -> set[str]:
        return {name for name, file in failed().items() if file.quarantined}

    names = ["part-0", "part-1", "part-2", "rest-3"]
    for name in names:
        source.put(f"{name}.jsonl", b"not json\n")
    source.put("good.jsonl", rows(4, "good"))
    sync()
    assert not materialize(["good", *names]).success
    for _ in range(MAX_TRIES - 1):
        tick("rerun_failed_files")
    assert held() == set(names)
    assert release_files(instance, workspace, ["part-1..part-2"]) == ["part-1", "part-2"]
    assert held() == {"part-0", "rest-3"}
    with pytest.raises(UserError, match="no failed file for good, p-"):
        release_files(instance, workspace, ["good", "p-*"])
    assert release_files(instance, workspace, []) == ["part-0", "rest-3"]
    assert held() == set()
    assert release_files(instance, workspace, []) == []


def test_a_check_that_its_failed_run_never_came_to_stops_no_tick(
    instance: dg.DagsterInstance,
    source: Store,
    sync: Sync,
    resources: dict[str, RecipeResource],
    tick: Callable[[str], list[dg.RunRequest]],
) -> None:
    source.put("bad.jsonl", b"not json\n")
    sync()
    result = dg.materialize(
        [completion_files.completion_file_assets, nothing_quarantined],
        partition_key="bad",
        instance=instance,
        resources=resources,
        raise_on_error=False,
    )
    assert not result.success
    (planned,) = instance.event_log_storage.get_asset_check_execution_history(QUARANTINE, limit=9)
    assert planned.status.value == "PLANNED"
    assert len(tick("rerun_failed_files")) == 1


def test_a_tick_asks_for_no_more_than_it_can_write_down_and_tells_only_what_is_new(
    instance: dg.DagsterInstance,
    source: Store,
    materialize: Materialize,
    sync: Sync,
    tick: Callable[[str], list[dg.RunRequest]],
    failed: Callable[[], dict[str, FailedFile]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def verdicts() -> int:
        return len(instance.event_log_storage.get_asset_check_execution_history(QUARANTINE, limit=100))

    monkeypatch.setattr(reruns, "TRIES_PER_TICK", 2)
    for number in range(5):
        source.put(f"{number}.jsonl", b"not json\n")
    names = [file.partition for file in sync()]
    assert not materialize(names).success
    for schedule in ("rerun_failed_files", "nightly_lineage"):
        before = {name: file.tries for name, file in failed().items()}
        (request,) = tick(schedule)
        assert [request.tags[end] for end in (RANGE_START, RANGE_END)] == ["0", "1"]
        assert {name for name, file in failed().items() if file.tries > before[name]} == {"0", "1"}
    for _ in range(2):
        tick("rerun_failed_files")
    assert verdicts() == 2, "first nothing is quarantined, then 0 and 1; 2 and 3 are only due"
    assert all(failed()[name].tries > 1 for name in names[:4])


def test_a_vanished_file_is_not_tried_again(
    source: Store,
    materialize: Materialize,
    sync: Sync,
    rows: Rows,
    tick: Callable[[str], list[dg.RunRequest]],
    failed: Callable[[], dict[str, FailedFile]],
) -> None:
    for name in ("a", "b"):
        source.put(f"{name}.jsonl", rows(4, name))
    sync()
    source.client.delete_object(Bucket=source.bucket, Key=source.prefix + "b.jsonl")
    assert not materialize(["a", "b"]).success
    assert failed() == {}, "vanished, and listed as such"
    assert tick("rerun_failed_files") == []
    source.put("b.jsonl", rows(5, "b"))
    assert not failed()["b"].quarantined
    assert [request.tags[RANGE_START] for request in tick("rerun_failed_files")] == ["b"]


def test_a_night_whose_training_set_is_gone_says_so(
    instance: dg.DagsterInstance,
    resources: dict[str, RecipeResource],
    source: Store,
    rows: Rows,
    tick: Callable[[str], list[dg.RunRequest]],
) -> None:
    source.put("a.jsonl", rows(4, "a"))
    (request,) = tick("nightly_lineage")
    tags = {"dagster/schedule_name": "nightly_lineage", **request.tags}
    for job in ("completion_files_job", "training_set_job"):
        instance.create_run_for_job(defs.resolve_job_def(job), status=dg.DagsterRunStatus.SUCCESS, tags=tags)
    with dg.build_sensor_context(instance, resources=resources) as context:
        answer = nightly_stages(context)
    assert isinstance(answer, dg.SkipReason)
    assert "no training set" in (answer.skip_message or "")


def test_the_night_goes_from_files_to_training_set_to_drafter(
    instance: dg.DagsterInstance,
    workspace: Workspace,
    resources: dict[str, RecipeResource],
    source: Store,
    materialize: Materialize,
    rows: Rows,
    tick: Callable[[str], list[dg.RunRequest]],
) -> None:
    def stage() -> dg.RunRequest | dg.SkipReason:
        with dg.build_sensor_context(instance, resources=resources) as context:
            answer = nightly_stages(context)
        assert isinstance(answer, dg.RunRequest | dg.SkipReason)
        return answer

    def run(job: str, status: dg.DagsterRunStatus, tags: dict[str, str]) -> None:
        definition = defs.resolve_job_def(job)
        instance.create_run_for_job(definition, status=status, tags=tags)

    for number in range(20):
        source.put(f"part-{number:02d}.jsonl", rows(12, f"part-{number:02d}"))
    source.put("part-20.jsonl.gz", b"\x1f\x8b broken")
    assert isinstance(stage(), dg.SkipReason)
    (request,) = tick("nightly_lineage")
    night = {"dagster/schedule_name": "nightly_lineage", **request.tags}
    assert not materialize([f"part-{number:02d}" for number in range(20)] + ["part-20.jsonl.gz"]).success
    run("completion_files_job", dg.DagsterRunStatus.STARTED, night)
    waiting = stage()
    assert isinstance(waiting, dg.SkipReason)
    assert "1 runs to go" in (waiting.skip_message or "")
    instance.report_run_failed(instance.get_runs(dg.RunsFilter(job_name="completion_files_job"))[0])

    frozen = stage()
    assert isinstance(frozen, dg.RunRequest)
    assert (frozen.job_name, frozen.tags[NIGHT]) == ("training_set_job", request.tags[NIGHT])
    assert freeze_training_set(workspace).verdict.passed, "20 of 21 files are enough"
    run("training_set_job", dg.DagsterRunStatus.SUCCESS, frozen.tags)

    trained = stage()
    assert isinstance(trained, dg.RunRequest)
    assert trained.job_name == "drafter_job"
    run("drafter_job", dg.DagsterRunStatus.FAILURE, trained.tags)
    crashed = stage()
    assert isinstance(crashed, dg.SkipReason)
    assert "drafter_job failed" in (crashed.skip_message or "")
    run("drafter_job", dg.DagsterRunStatus.SUCCESS, trained.tags)
    retried = stage()
    assert isinstance(retried, dg.SkipReason)
    assert "is done" in (retried.skip_message or ""), "the retry stands for the run that crashed"

    (again,) = tick("nightly_lineage")
    assert again.tags[RANGE_START] == "part-20.jsonl.gz", "only what has no shard"
