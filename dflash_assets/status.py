"""`dflash status`: partitions by state, failures with their reasons, quarantined and stale files, the last runs.

Asks the instance, not the webserver, so it works while the UI runs and while it does not.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from textwrap import shorten

import dagster as dg
import polars as pl
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from dflash_assets.checks import stale_reason, stale_shards
from dflash_assets.completion_files import FILE_ASSETS, raw_completions
from dflash_assets.partitions import sync_partitions
from dflash_assets.quarantine import FailedFile, failed_files, statuses
from dflash_core.errors import UserError
from dflash_core.shards.state import ShardProblem
from dflash_core.workspace import Workspace

STATES = ("materialized", "stale", "failed", "in progress", "missing")
RUNS, SHOWN = 8, 10
REASON = 70
"""Characters; the whole reasons are with the failed files and in the UI."""


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

    partitions: pl.DataFrame
    """asset, partition, state. Stale: green in the UI, but the shard, the file or the recipe is not what it was."""
    failed: list[FailedFile]
    stale: dict[str, str]
    """Partition -> why."""
    unknown: str
    """Why nobody can say what is stale; empty: it can be said."""
    vanished: tuple[str, ...]
    runs: list[RunSummary]


def read_status(instance: dg.DagsterInstance, workspace: Workspace) -> Status:
    """How things stand in an instance.

    Raises:
        StorageError: the bucket cannot be listed.
    """
    synced = sync_partitions(instance, workspace)
    etags = {source.partition: source.etag for source in synced.sources}
    unknown, stale = "", {}
    try:
        stale = stale_shards(instance, workspace, synced.sources)
    except UserError as error:
        unknown = str(error)
    older = [partition for partition, state in stale.items() if state.problem == ShardProblem.OLDER]
    return Status(
        partitions=_partitions(instance, list(stale), older),
        failed=failed_files(instance, etags, workspace.recipe.automation.max_attempts),
        stale={partition: stale_reason(state) for partition, state in stale.items()},
        unknown=unknown,
        vanished=synced.vanished,
        runs=[_summary(instance, record) for record in instance.get_run_records(limit=RUNS)],
    )


def render(status: Status) -> RenderableType:
    """For a terminal."""
    partitions = Table("asset", *STATES, title="partitions", title_justify="left")
    counted = status.partitions.group_by("asset", maintain_order=True).agg(
        (pl.col("state") == state).sum().alias(state) for state in STATES
    )
    for asset, *counts in counted.iter_rows():
        partitions.add_row(asset, *(f"{count:,}" for count in counts))
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


def _partitions(instance: dg.DagsterInstance, stale: Sequence[str], older: Sequence[str]) -> pl.DataFrame:
    """See `Status.partitions`. raw_completions are stale only where the file itself is another one now."""
    shown = [
        (asset, partition, state) for asset, states in statuses(instance).items() for partition, state in states.items()
    ]
    found = pl.DataFrame(shown, schema={"asset": pl.String, "partition": pl.String, "state": pl.String}, orient="row")
    raw = pl.col("asset") == raw_completions.key.to_user_string()
    is_stale = pl.when(raw).then(pl.col("partition").is_in(older)).otherwise(pl.col("partition").is_in(stale))
    return found.with_columns(
        state=pl.when((pl.col("state") == "materialized") & is_stale).then(pl.lit("stale")).otherwise("state")
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
