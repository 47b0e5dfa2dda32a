"""Failed files: why they failed, how often they were tried, and which are tried no more until somebody releases them.

The event log is the ledger. Every further try is an observation on the file's page, with the ETag it is for, written
before the run is asked for, so that a file which kills its run counts, too. A run that ends for another reason than the
file (recipe, target, store) says so on the page of each file it did not come to, and is not counted as a try. Another
version of the file, a success or a release starts the count from zero.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import dagster as dg

from dflash_assets.completion_files import FILE_ASSETS, raw_completions
from dflash_assets.failures import FAILED, STOPPED
from dflash_assets.metadata import table
from dflash_assets.partitions import NAME, completion_files, sync_partitions
from dflash_core.storage.partitions import select_files
from dflash_core.workspace import Workspace

STATE, TRY_AGAIN, RELEASED = "state", "asked for again", "released"
PAGE = 1000
QUARANTINE = dg.AssetCheckKey(raw_completions.key, "nothing_quarantined")


@dataclass(frozen=True)
class FailedFile:
    """A partition of which the last run failed."""

    partition: str
    reason: str
    tries: int
    """Runs of this version that failed or were asked for, the first included; not those that never came to it."""
    quarantined: bool


def statuses(instance: dg.DagsterInstance) -> dict[str, dict[str, str]]:
    """Per asset, the state of every partition: "materialized", "failed", "in progress" or "missing"."""
    keys = instance.get_dynamic_partitions(NAME)
    found = {}
    for asset in FILE_ASSETS:
        states = instance.get_status_by_partition(asset, keys, completion_files) or {}
        found[asset.to_user_string()] = {
            key: "missing" if (state := states.get(key)) is None else state.name.replace("_", " ").lower()
            for key in keys
        }
    return found


def failed_files(instance: dg.DagsterInstance, etags: Mapping[str, str], max_tries: int) -> list[FailedFile]:
    """Every partition that failed in one of the three assets and does not run, sorted.

    Args:
        instance: its event log is read.
        etags: of the files in the bucket; a partition without one has vanished and does not count as failed.
        max_tries: at most so many for one version of a file.
    """
    states = list(statuses(instance).values())
    failed = sorted({key for of in states for key, state in of.items() if state == FAILED})
    failed = [key for key in failed if key in etags and all(of[key] != "in progress" for of in states)]
    reasons: dict[str, str] = {}
    for asset in FILE_ASSETS:
        for partition, _, metadata in _records(instance.fetch_observations, asset, failed):
            if metadata.get(STATE) in (FAILED, STOPPED):
                reasons.setdefault(partition, str(metadata["reason"]))
    tries = _tries(instance, failed, etags)
    return [
        FailedFile(
            key,
            reasons.get(key, "its run died or was terminated"),
            tries[key],
            tries[key] >= max_tries,
        )
        for key in failed
    ]


def note_try(instance: dg.DagsterInstance, failed: FailedFile, etag: str) -> None:
    """Write down that a failed file is asked for again."""
    metadata: dict[str, str | int] = {
        STATE: TRY_AGAIN,
        "try": failed.tries + 1,
        "etag": etag,
        "failed before": failed.reason,
    }
    _observe(instance, failed.partition, metadata)


def release_files(instance: dg.DagsterInstance, workspace: Workspace, selectors: Sequence[str]) -> list[str]:
    """Release the failed files that keys, patterns or ranges name, or whatever is quarantined; returns their keys.

    Raises:
        UserError: a selector names no failed file.
        StorageError: the bucket cannot be listed.
    """
    etags = {source.partition: source.etag for source in sync_partitions(instance, workspace).sources}
    failed = failed_files(instance, etags, workspace.recipe.automation.max_attempts)
    chosen = select_files(failed, selectors, "failed file") if selectors else [f for f in failed if f.quarantined]
    for file in chosen:
        release(instance, file.partition)
    return [file.partition for file in chosen]


def release(instance: dg.DagsterInstance, partition: str) -> None:
    """Let a partition be tried again, with a fresh count."""
    _observe(instance, partition, {STATE: RELEASED})


def quarantine_verdict(failed: Sequence[FailedFile]) -> dg.AssetCheckEvaluation:
    """The listing that the UI shows, as a check of raw_completions."""
    held = [file for file in failed if file.quarantined]
    return dg.AssetCheckEvaluation(
        asset_key=QUARANTINE.asset_key,
        check_name=QUARANTINE.name,
        passed=not held,
        severity=dg.AssetCheckSeverity.WARN,
        description=f"{len(held)} files are tried no more; repair them, or `dflash partitions release KEY` (--all)"
        if held
        else None,
        metadata={
            "quarantined": len(held),
            "failed": len(failed),
            "files": table(
                [{"partition": file.partition, "tries": file.tries, "reason": file.reason} for file in held]
            ),
        },
    )


def report_quarantine(instance: dg.DagsterInstance, failed: Sequence[FailedFile]) -> None:
    """Write the listing down where it differs from the last one."""
    verdict = quarantine_verdict(failed)
    history = instance.event_log_storage.get_asset_check_execution_history(QUARANTINE, limit=1)
    event = history[0].event.dagster_event if history and history[0].event else None
    given = event is not None and event.event_type == dg.DagsterEventType.ASSET_CHECK_EVALUATION  # else only planned
    last = event.asset_check_evaluation_data if event and given else None
    if last is None or (last.passed, last.metadata) != (verdict.passed, verdict.metadata):
        instance.report_runless_asset_event(verdict)


def _observe(instance: dg.DagsterInstance, partition: str, metadata: Mapping[str, str | int]) -> None:
    instance.report_runless_asset_event(
        dg.AssetObservation(raw_completions.key, partition=partition, metadata=dict(metadata))
    )


def _tries(instance: dg.DagsterInstance, failed: Sequence[str], etags: Mapping[str, str]) -> dict[str, int]:
    """1 for the run that failed first (0 after a release) and 1 for each further try since, less the stopped runs."""
    since = dict.fromkeys(failed, -1)
    tries = dict.fromkeys(failed, 1)
    for partition, storage_id, _ in _records(instance.fetch_materializations, raw_completions.key, failed):
        since[partition] = max(since[partition], storage_id)
    for partition, storage_id, metadata in _records(instance.fetch_observations, raw_completions.key, failed):
        if storage_id <= since[partition]:
            continue
        if metadata.get(STATE) == RELEASED:
            since[partition], tries[partition] = storage_id, tries[partition] - 1
        elif metadata.get(STATE) == TRY_AGAIN and metadata["etag"] == etags.get(partition):
            tries[partition] += 1
        elif metadata.get(STATE) == STOPPED:
            tries[partition] -= 1
    return {partition: max(0, count) for partition, count in tries.items()}


def _records(
    fetch: Callable[..., dg.EventRecordsResult], asset: dg.AssetKey, partitions: Sequence[str]
) -> Iterator[tuple[str, int, dict[str, object]]]:
    """(partition, storage id, metadata) of all such events of these partitions, the newest first."""
    for first in range(0, len(partitions), PAGE):
        cursor: str | None = None
        more = True
        while more:
            wanted = dg.AssetRecordsFilter(asset, asset_partitions=partitions[first : first + PAGE])
            page = fetch(wanted, limit=PAGE, cursor=cursor)
            for record in page.records:
                event = record.asset_materialization or record.asset_observation
                assert event is not None
                assert event.partition is not None
                yield event.partition, record.storage_id, {name: m.value for name, m in event.metadata.items()}
            cursor, more = page.cursor, page.has_more
