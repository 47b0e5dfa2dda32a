"""New files by themselves: what appears or changes in the bucket becomes a partition and is taken to its statistics.

The instance remembers every version (partition and ETag) that was asked for, as a set of dynamic partitions of its own:
a cursor that held them would be stored again with every tick. What a tick asks for is in its cursor, which Dagster
keeps only together with the runs, and the next tick moves it into the set; so a daemon that dies asks again, under the
same run keys.
"""

import time
from collections.abc import Mapping, Sequence

import dagster as dg

from dflash_assets.checks import SHARDS_CURRENT, drift_evaluation
from dflash_assets.completion_files import completion_file_assets, raw_completions
from dflash_assets.partitions import range_request, ranges_of, remember, sync_partitions
from dflash_assets.quarantine import QUARANTINE
from dflash_assets.resources import RecipeResource
from dflash_core.errors import UserError
from dflash_core.records import Record, SourceFile
from dflash_core.shards.state import invalid_shards
from dflash_core.tokenization.tokenizer import fingerprint
from dflash_core.workspace import Workspace

RUNS_PER_TICK = 50
FORGOTTEN_PER_TICK = 200
"""Dagster removes dynamic partitions one by one, and every vanished file gets an event."""
ASKED_FOR = "completion_file_versions"

completion_files_job = dg.define_asset_job(
    "completion_files_job",
    selection=dg.AssetSelection.assets(completion_file_assets) - dg.AssetSelection.checks(QUARANTINE, SHARDS_CURRENT),
    description="Source files to shards and statistics, over one range of partitions.",
)


class _Cursor(Record):
    """What the last tick asked for."""

    batch: int
    """Goes up with every tick: a version that comes back after another one is a run of its own."""
    asked_for: tuple[str, ...]


@dg.sensor(job=completion_files_job, minimum_interval_seconds=60)
def new_completion_files(context: dg.SensorEvaluationContext, recipe: RecipeResource) -> dg.SensorResult:
    """Every new or changed source file becomes a partition and is processed; a vanished one is noted on its page."""
    instance = context.instance
    try:
        workspace = recipe.open()
        synced = sync_partitions(instance, workspace)
        current = {_version(source): source for source in synced.sources}
        before = _Cursor.model_validate_json(context.cursor) if context.cursor else None
        asked = _asked_for(instance, workspace, before, current)
    except (UserError, dg.Failure) as error:
        return dg.SensorResult(skip_reason=str(error), cursor=context.cursor)
    vanished = _forget(instance, sorted(asked - set(current)), {source.partition for source in synced.sources})
    fresh = {source.partition: version for version, source in current.items() if version not in asked}
    ranges = ranges_of(instance, fresh)[:RUNS_PER_TICK]
    batch = (before.batch if before else int(time.time())) + 1
    counts = f"{len(current)} files, {len(fresh)} new or changed, {len(vanished)} vanished"
    return dg.SensorResult(
        run_requests=[range_request(keys, f"{batch}: {keys[0]}...{keys[-1]}") for keys in ranges],
        skip_reason=None if ranges else counts,
        cursor=_Cursor(batch=batch, asked_for=tuple(fresh[key] for keys in ranges for key in keys)).model_dump_json(),
        asset_events=[
            *vanished,
            *(drift_evaluation(workspace, synced.sources, context.log.warning) if fresh or vanished else []),
        ],
    )


def _version(source: SourceFile) -> str:
    return f"{source.partition}:{source.etag}"


def _asked_for(
    instance: dg.DagsterInstance, workspace: Workspace, before: "_Cursor | None", current: Mapping[str, SourceFile]
) -> set[str]:
    """Versions that were asked for; at the first tick those that a backfill has done already."""
    asked = set(instance.get_dynamic_partitions(ASKED_FOR))
    if before is None and not asked:
        done = instance.get_materialized_partitions(raw_completions.key)
        sources = [source for source in current.values() if source.partition in done]
        recipe = workspace.recipe
        downloads = recipe.storage.downloads
        missing = invalid_shards(workspace.derived, fingerprint(recipe), sources, downloads) if sources else {}
        new = [_version(source) for source in sources if source.partition not in missing]
    else:
        new = [version for version in (before.asked_for if before else ()) if version not in asked]
    remember(instance, ASKED_FOR, new)
    return asked.union(new)


def _forget(instance: dg.DagsterInstance, gone: Sequence[str], present: set[str]) -> list[dg.AssetObservation]:
    """Versions that are in the bucket no more leave the set; those whose file vanished give an event."""
    events = []
    for version in gone[:FORGOTTEN_PER_TICK]:
        instance.delete_dynamic_partition(ASKED_FOR, version)
        partition, _, etag = version.rpartition(":")
        if partition not in present:
            events.append(
                dg.AssetObservation(
                    raw_completions.key, partition=partition, metadata={"state": "vanished", "last etag": etag}
                )
            )
    return events
