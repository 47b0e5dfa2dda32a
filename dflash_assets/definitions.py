"""The code location: every asset in flow order, with the recipe that DFLASH_RECIPE names."""

import os
from pathlib import Path

import dagster as dg

from dflash_assets.alerts import tell_of_failed_runs
from dflash_assets.automation import completion_files_job, new_completion_files
from dflash_assets.checks import nothing_quarantined, sources_current, trained_on_current_shards
from dflash_assets.completion_files import completion_file_assets
from dflash_assets.drafter_checkpoint import drafter_checkpoint, drafter_coverage
from dflash_assets.drafter_eval import drafter_eval
from dflash_assets.drafter_export import drafter_export
from dflash_assets.generated_completions import generated_completions
from dflash_assets.reruns import drafter_job, nightly_stages, schedules, training_set_job
from dflash_assets.resources import RecipeResource, s3_of_environment
from dflash_assets.training_set import training_set
from dflash_core.recipe import load_recipe

DEFAULT_RECIPE = "recipes/demo.toml"
s3 = s3_of_environment()

recipe = os.environ.get("DFLASH_RECIPE", DEFAULT_RECIPE)

defs = dg.Definitions(
    assets=[
        generated_completions,
        completion_file_assets,
        training_set,
        drafter_checkpoint,
        drafter_coverage,
        drafter_eval,
        drafter_export,
    ],
    asset_checks=[nothing_quarantined, sources_current, trained_on_current_shards],
    jobs=[completion_files_job, training_set_job, drafter_job],
    schedules=schedules(load_recipe(Path(recipe)).automation),
    sensors=[new_completion_files, nightly_stages, tell_of_failed_runs],
    resources={"s3": s3, "recipe": RecipeResource(path=recipe, s3=s3)},
    executor=dg.in_process_executor,
)
