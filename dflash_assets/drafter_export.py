"""drafter_export: the drafter folder in the published format that serving engines load."""

import dagster as dg

from dflash_assets import children
from dflash_assets.drafter_checkpoint import drafter_checkpoint
from dflash_assets.drafter_eval import RunConfig, drafter_eval
from dflash_assets.metadata import GROUP, file_uri, table
from dflash_assets.resources import RecipeResource
from dflash_core.storage.layout import RunKeys


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
    workspace = recipe.open()
    derived = workspace.derived
    export = children.export(context, workspace, config.run)
    return dg.MaterializeResult(
        metadata={
            **file_uri(derived.uri(RunKeys(export.run).export_folder)),
            "run": export.run,
            "training set": export.training_set,
            "dtype": export.dtype,
            "files": table([{"object": derived.uri(f.key), "bytes": f.size, "sha256": f.sha256} for f in export.files]),
        }
    )
