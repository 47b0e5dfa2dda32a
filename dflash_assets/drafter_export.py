"""drafter_export: the drafter folder in the published format that serving engines load."""

import dagster as dg

from dflash_assets.drafter_checkpoint import drafter_checkpoint
from dflash_assets.drafter_eval import RunConfig, drafter_eval
from dflash_assets.metadata import GROUP, file_uri, table
from dflash_assets.process import run_core
from dflash_assets.resources import RecipeResource
from dflash_core.records import DrafterExport
from dflash_core.storage.store import open_stores


@dg.asset(
    deps=[drafter_checkpoint, drafter_eval],
    description="config.json, model.safetensors and a model card, as serving engines load them.",
    group_name=GROUP,
    kinds={"safetensors", "s3"},
    tags={"stage": "drafter"},
    owners=["team:training"],
)
def drafter_export(
    context: dg.AssetExecutionContext, recipe: RecipeResource, config: RunConfig
) -> dg.MaterializeResult:  # type: ignore[type-arg]
    """Write the folder to S3, and to the recipe's local folder."""
    settings = recipe.load()
    export = run_core(["dflash_core.cli", "export", "--recipe", recipe.path, *config.arguments()], DrafterExport)
    derived = open_stores(settings).derived
    return dg.MaterializeResult(
        metadata={
            **file_uri(derived.uri(f"drafter_export/{export.run}/")),
            "run": export.run,
            "training set": export.training_set,
            "dtype": export.dtype,
            "files": table([{"object": derived.uri(f.key), "bytes": f.size, "sha256": f.sha256} for f in export.files]),
        }
    )
