"""What runs by itself once switched on: new files become partitions and are materialized."""

from collections.abc import Iterator

import dagster as dg

from dflash_assets.completion_files import completion_file_assets
from dflash_assets.partitions import sync_partitions
from dflash_assets.resources import RecipeResource

RUNS_PER_TICK = 50

completion_files_job = dg.define_asset_job(
    "completion_files_job", selection=dg.AssetSelection.assets(completion_file_assets)
)


@dg.sensor(job=completion_files_job, minimum_interval_seconds=60)
def new_completion_files(
    context: dg.SensorEvaluationContext, recipe: RecipeResource
) -> Iterator[dg.RunRequest | dg.SkipReason]:
    """Every new or changed source file becomes a partition and a run; a run key holds the ETag, so none comes twice."""
    synced = sync_partitions(context.instance, recipe.load())
    seen = set((context.cursor or "").split())
    fresh = [s for s in synced.sources if f"{s.partition}:{s.etag}" not in seen][:RUNS_PER_TICK]
    if not fresh:
        yield dg.SkipReason(f"{len(synced.sources)} files, none new or changed")
    for source in fresh:
        yield dg.RunRequest(partition_key=source.partition, run_key=f"{source.partition}:{source.etag}")
    current = {f"{s.partition}:{s.etag}" for s in synced.sources}
    context.update_cursor("\n".join(sorted((seen & current) | {f"{s.partition}:{s.etag}" for s in fresh})))
