"""`dflash status`: partitions by state, failures with their reasons, quarantined and stale files, the last runs.

Asks the instance, not the webserver, so it works while the UI runs and while it does not.
"""

from collections import Counter
from dataclasses import dataclass
from datetime import datetime
from textwrap import shorten

import dagster as dg
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from dflash_assets.checks import stale_shards
from dflash_assets.completion_files import FILE_ASSETS, raw_completions
from dflash_assets.partitions import sync_partitions
from dflash_assets.quarantine import FailedFile, failed_files, statuses
from dflash_core.errors import UserError
from dflash_core.quality.drift import OLDER
from dflash_core.recipe import Recipe

STATES = ("materialized", "stale", "failed", "in progress", "missing")
RUNS, SHOWN = 8, 10
REASON = 70
"""Characters; the whole reasons stand beside the failed files and in the UI."""


@dataclass(frozen=True)
class RunSummary:
    """One of the last runs."""

    run: str
    what: str
    status: str
    started: float | None
    """Seconds since the epoch."""
    ended: float | None
    reason: str
    """Why it failed; empty otherwise."""


@dataclass(frozen=True)
class Status:
    """How things stand."""

    partitions: dict[str, Counter[str]]
    """Asset -> state -> partitions. Stale: green in the UI, but the file or the recipe is not what it was."""
    failed: list[FailedFile]
    stale: dict[str, str]
    """Partition -> why."""
    unknown: str
    """Why nobody can say what is stale; empty: it can be said."""
    vanished: tuple[str, ...]
    runs: list[RunSummary]


def read_status(instance: dg.DagsterInstance, recipe: Recipe) -> Status:
    """How things stand in an instance.

    Raises:
        StorageError: the bucket cannot be listed.
    """
    synced = sync_partitions(instance, recipe)
    etags = {source.partition: source.etag for source in synced.sources}
    unknown, stale = "", dict[str, str]()
    try:
        stale = stale_shards(instance, recipe, synced.sources)
    except UserError as error:
        unknown = str(error)
    older = {partition for partition, why in stale.items() if why == OLDER}
    return Status(
        partitions={
            asset: _counted(states, older if asset == raw_completions.key.to_user_string() else set(stale))
            for asset, states in statuses(instance).items()
        },
        failed=failed_files(instance, etags, recipe.automation.max_attempts),
        stale=stale,
        unknown=unknown,
        vanished=synced.vanished,
        runs=[_summary(instance, record) for record in instance.get_run_records(limit=RUNS)],
    )


def render(status: Status) -> RenderableType:
    """For a terminal."""
    partitions = Table("asset", *STATES, title="partitions", title_justify="left")
    for asset, counts in status.partitions.items():
        partitions.add_row(asset, *(f"{counts[state]:,}" for state in STATES))
    parts: list[RenderableType] = [partitions]
    if status.failed:
        table = Table("partition", "tries", "", "reason", title="failed", title_justify="left")
        for file in status.failed:
            held = "[red]quarantined[/]" if file.quarantined else "due"
            table.add_row(escape(file.partition), str(file.tries), held, escape(file.reason))
        parts += [table, "release quarantined ones with: dflash partitions release KEY..., or --all"]
    if status.stale:
        first = "; ".join(f"{partition}: {why}" for partition, why in sorted(status.stale.items())[:SHOWN])
        parts.append(f"{len(status.stale)} partitions are stale, materialize them again: {escape(first)}")
    if status.unknown:
        parts.append(f"[red]what is stale cannot be said: {escape(status.unknown)}[/]")
    if status.vanished:
        parts.append(f"{len(status.vanished)} partitions without a file: {escape(', '.join(status.vanished[:SHOWN]))}")
    runs = Table("run", "what", "status", "started", "seconds", "reason", title="last runs", title_justify="left")
    for run in status.runs:
        started = datetime.fromtimestamp(run.started).strftime("%m-%d %H:%M") if run.started else ""
        seconds = f"{run.ended - run.started:.0f}" if run.started and run.ended else ""
        runs.add_row(run.run[:8], escape(run.what), run.status, started, seconds, escape(shorten(run.reason, REASON)))
    parts.append(runs if status.runs else "no runs yet")
    return Group(*parts)


def _counted(states: dict[str, str], stale: set[str]) -> Counter[str]:
    return Counter(
        "stale" if state == "materialized" and partition in stale else state for partition, state in states.items()
    )


def _summary(instance: dg.DagsterInstance, record: dg.RunRecord) -> RunSummary:
    run = record.dagster_run
    assets = sorted(key.to_user_string() for key in run.asset_selection or ())
    range_start, range_end = (run.tags.get(f"dagster/asset_partition_range_{end}") for end in ("start", "end"))
    partition = run.tags.get("dagster/partition") or (f"{range_start} to {range_end}" if range_start else "")
    of_files = {key.to_user_string() for key in FILE_ASSETS} == set(assets)
    what = "files" if of_files else ", ".join(assets) or run.job_name
    return RunSummary(
        run=run.run_id,
        what=f"{what} ({partition})" if partition else what,
        status=run.status.value.lower(),
        started=record.start_time,
        ended=record.end_time,
        reason=_reason(instance, run.run_id) if run.status == dg.DagsterRunStatus.FAILURE else "",
    )


def _reason(instance: dg.DagsterInstance, run: str) -> str:
    for entry in instance.all_logs(run, of_type=dg.DagsterEventType.STEP_FAILURE):
        data = entry.get_dagster_event().step_failure_data
        if data.user_failure_data is not None and data.user_failure_data.description:
            return data.user_failure_data.description
        if data.error is not None:
            return data.error.message.strip()
    return "the run died"
