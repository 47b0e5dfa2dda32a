"""Failed files: why they failed, how often they were tried, and which are tried no more until somebody releases them.

The event log is the ledger. Every further try is an observation on the file's page, with the ETag it is for, written
before the run is asked for, so that a file which kills its run counts, too. Another version of the file, a success or a
release starts the count anew.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import dagster as dg

from dflash_assets.completion_files import FILE_ASSETS, raw_completions
from dflash_assets.metadata import table
from dflash_assets.partitions import NAME, completion_files
from dflash_core.errors import UserError

STATE, TRY_AGAIN, RELEASED, FAILED = "state", "asked for again", "released", "failed"
PAGE = 1000
QUARANTINE = dg.AssetCheckKey(raw_completions.key, "nothing_quarantined")


@dataclass(frozen=True)
class FailedFile:
    """A partition of which the last run failed."""

    partition: str
    reason: str
    tries: int
    """Runs of this version of the file that failed or were asked for, the first included."""
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
        etags: of the files in the bucket; a partition without one has vanished and is none of the failed.
        max_tries: at most so many for one version of a file.
    """
    states = list(statuses(instance).values())
    failed = sorted({key for of in states for key, state in of.items() if state == FAILED})
    failed = [key for key in failed if key in etags and all(of[key] != "in progress" for of in states)]
    reasons: dict[str, str] = {}
    for asset in FILE_ASSETS:
        for partition, _, metadata in _records(instance.fetch_observations, asset, failed):
            if metadata.get(STATE) == FAILED:
                reasons.setdefault(partition, str(metadata["reason"]))
    tries = _tries(instance, failed, etags)
    return [
        FailedFile(
            key,
            reasons.get(key, "its run died or was stopped"),
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


def release(instance: dg.DagsterInstance, partition: str) -> None:
    """Let a partition be tried again, with a fresh count.

    Raises:
        UserError: there is no such partition.
    """
    if not instance.has_dynamic_partition(NAME, partition):
        raise UserError(f"no partition {partition} in this instance; `dflash status` lists the quarantined ones")
    _observe(instance, partition, {STATE: RELEASED})


def quarantine_verdict(failed: Sequence[FailedFile]) -> dg.AssetCheckEvaluation:
    """The listing that the UI shows, as a check of raw_completions."""
    held = [file for file in failed if file.quarantined]
    return dg.AssetCheckEvaluation(
        asset_key=QUARANTINE.asset_key,
        check_name=QUARANTINE.name,
        passed=not held,
        severity=dg.AssetCheckSeverity.WARN,
        description=f"{len(held)} files are tried no more; repair them, or `dflash partitions release KEY`"
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


def _observe(instance: dg.DagsterInstance, partition: str, metadata: Mapping[str, str | int]) -> None:
    instance.report_runless_asset_event(
        dg.AssetObservation(raw_completions.key, partition=partition, metadata=dict(metadata))
    )


def _tries(instance: dg.DagsterInstance, failed: Sequence[str], etags: Mapping[str, str]) -> dict[str, int]:
    """1 for the run that failed first (0 after a release), and one for each further try since."""
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
    return tries


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
