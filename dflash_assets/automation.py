"""What runs by itself once switched on: new files become partitions and are materialized."""

import dagster as dg

from dflash_assets.completion_files import completion_file_assets
from dflash_assets.partitions import sync_partitions
from dflash_assets.resources import RecipeResource

RUNS_PER_TICK = 50

completion_files_job = dg.define_asset_job(
    "completion_files_job", selection=dg.AssetSelection.assets(completion_file_assets)
)


@dg.sensor(job=completion_files_job, minimum_interval_seconds=60)
def new_completion_files(context: dg.SensorEvaluationContext, recipe: RecipeResource) -> dg.SensorResult:
    """Every new or changed source file becomes a partition and a run; a run key holds the ETag, so none comes twice."""
    synced = sync_partitions(context.instance, recipe.load())
    current = {f"{source.partition}:{source.etag}": source.partition for source in synced.sources}
    seen = set((context.cursor or "").split()) & set(current)
    fresh = [version for version in current if version not in seen][:RUNS_PER_TICK]
    return dg.SensorResult(
        run_requests=[dg.RunRequest(partition_key=current[version], run_key=version) for version in fresh],
        skip_reason=None if fresh else f"{len(current)} files, none new or changed",
        cursor="\n".join(sorted(seen.union(fresh))),
    )
