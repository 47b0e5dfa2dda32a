"""The code location: every asset in flow order, with the recipe that DFLASH_RECIPE names."""

import os
from pathlib import Path

import dagster as dg

from dflash_assets.alerts import alert_sensor
from dflash_assets.automation import completion_files_job, new_completion_files
from dflash_assets.checks import nothing_quarantined, shards_current, sources_current, trained_on_current_shards
from dflash_assets.completion_files import completion_file_assets, raw_completions
from dflash_assets.drafter_checkpoint import drafter_checkpoint, drafter_coverage
from dflash_assets.drafter_eval import drafter_eval
from dflash_assets.drafter_export import drafter_export
from dflash_assets.generated_completions import generated_completions
from dflash_assets.reruns import drafter_job, nightly_stages, schedules, training_set_job
from dflash_assets.resources import RecipeResource, s3_of_environment
from dflash_assets.training_set import training_set
from dflash_core.recipe import Recipe, load_recipe

DEFAULT_RECIPE = "recipes/demo.toml"
s3 = s3_of_environment()

recipe = os.environ.get("DFLASH_RECIPE", DEFAULT_RECIPE)
settings = load_recipe(Path(recipe))


def source_assets(settings: Recipe) -> list[dg.AssetsDefinition]:
    """The files' assets; a recipe without generation has no box for it: every launch would warn that it never ran."""
    if settings.generation is not None:
        return [generated_completions, completion_file_assets]
    return [
        completion_file_assets.map_asset_specs(
            lambda spec: spec.replace_attributes(deps=[]) if spec.key == raw_completions.key else spec
        )
    ]


defs = dg.Definitions(
    assets=[
        *source_assets(settings),
        training_set,
        drafter_checkpoint,
        drafter_coverage,
        drafter_eval,
        drafter_export,
    ],
    asset_checks=[nothing_quarantined, shards_current, sources_current, trained_on_current_shards],
    jobs=[completion_files_job, training_set_job, drafter_job],
    schedules=schedules(settings.automation),
    sensors=[new_completion_files, nightly_stages, alert_sensor(settings.alerts)],
    resources={"s3": s3, "recipe": RecipeResource(path=recipe, s3=s3)},
    executor=dg.in_process_executor,
)
