"""The code location: every asset in flow order, with the recipe that DFLASH_RECIPE names."""

import os

import dagster as dg

from dflash_assets.automation import completion_files_job, new_completion_files
from dflash_assets.completion_files import completion_file_assets
from dflash_assets.drafter_checkpoint import drafter_checkpoint, drafter_coverage
from dflash_assets.drafter_eval import drafter_eval
from dflash_assets.drafter_export import drafter_export
from dflash_assets.generated_completions import generated_completions
from dflash_assets.resources import RecipeResource, s3_of_environment
from dflash_assets.training_set import training_set

DEFAULT_RECIPE = "recipes/demo.toml"
s3 = s3_of_environment()

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
    jobs=[completion_files_job],
    sensors=[new_completion_files],
    resources={"s3": s3, "recipe": RecipeResource(path=os.environ.get("DFLASH_RECIPE", DEFAULT_RECIPE), s3=s3)},
    executor=dg.in_process_executor,
)
