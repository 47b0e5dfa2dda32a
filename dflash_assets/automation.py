"""What runs by itself once switched on: new files become partitions and are materialized."""

import dagster as dg

from dflash_assets.completion_files import completion_file_assets, raw_completions
from dflash_assets.partitions import sync_partitions
from dflash_assets.resources import RecipeResource
from dflash_core.errors import UserError

RUNS_PER_TICK = 50

completion_files_job = dg.define_asset_job(
    "completion_files_job", selection=dg.AssetSelection.assets(completion_file_assets)
)


@dg.sensor(job=completion_files_job, minimum_interval_seconds=60)
def new_completion_files(context: dg.SensorEvaluationContext, recipe: RecipeResource) -> dg.SensorResult:
    """Every new or changed source file becomes a partition and a run; the cursor holds the versions asked for."""
    try:
        synced = sync_partitions(context.instance, recipe.load())
    except (UserError, dg.Failure) as error:
        return dg.SensorResult(skip_reason=str(error), cursor=context.cursor)
    current = {f"{source.partition}:{source.etag}": source.partition for source in synced.sources}
    seen = set(context.cursor.split()) if context.cursor else _materialized(context.instance, current)
    seen &= set(current)
    fresh = [version for version in current if version not in seen][:RUNS_PER_TICK]
    return dg.SensorResult(
        run_requests=[dg.RunRequest(partition_key=current[version]) for version in fresh],
        skip_reason=None if fresh else f"{len(current)} files, none new or changed",
        cursor="\n".join(sorted(seen.union(fresh))),
    )


def _materialized(instance: dg.DagsterInstance, current: dict[str, str]) -> set[str]:
    """At the first tick: what a backfill has done already is not asked for again."""
    done = instance.get_materialized_partitions(raw_completions.key)
    return {version for version, partition in current.items() if partition in done}
