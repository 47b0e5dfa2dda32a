"""drafter_checkpoint and drafter_coverage: the drafter's weights, and what the training run took from each source file.

Training runs in child processes behind the `gpu` pool, one run at a time; its steps stream into the run's log. The
weights are one unpartitioned asset; the same run reports drafter_coverage for every file it consumed.
"""

from collections.abc import Iterator

import dagster as dg

from dflash_assets import children
from dflash_assets.metadata import GROUP, file_uri, picture, table, version_tags
from dflash_assets.partitions import NAME as PARTITIONS_NAME
from dflash_assets.partitions import completion_files, remember
from dflash_assets.resources import RecipeResource
from dflash_assets.training_set import training_set
from dflash_core import TRAINING_VERSION
from dflash_core.records import DrafterCheckpoint
from dflash_core.storage.s3 import Store
from dflash_core.training.job import Job

GPU_TAGS = {"dagster-k8s/config": {"container_config": {"resources": {"limits": {"nvidia.com/gpu": "1"}}}}}
"""For dagster-k8s: as many as the recipe's placement has, see deploy/README.md; tags are read before the recipe is."""
WORST_SHOWN = 10


class TrainingConfig(dg.Config):
    """Which training set, and whether a failed gate stops the run."""

    training_set: str | None = None
    """Hash; none given: the latest."""
    accept_failed_gate: bool = False
    """Train although the gate failed; recorded in the checkpoint."""


drafter_coverage = dg.AssetSpec(
    "drafter_coverage",
    deps=["drafter_checkpoint"],
    partitions_def=completion_files,
    description="What the latest drafter took from each source file and how well it learned it.",
    group_name=GROUP,
    kinds={"pytorch"},
    tags={"stage": "training"},
    owners=["team:training"],
    code_version=TRAINING_VERSION,
)


@dg.asset(
    deps=[training_set],
    description="The drafter, trained online against the frozen target whose hidden states are taken by hooks.",
    group_name=GROUP,
    kinds={"pytorch", "safetensors", "gpu"},
    tags={"gpu": "", "stage": "training"},
    owners=["team:training"],
    code_version=TRAINING_VERSION,
    pool="gpu",
    op_tags=GPU_TAGS,
    output_required=False,
)
def drafter_checkpoint(
    context: dg.AssetExecutionContext, recipe: RecipeResource, config: TrainingConfig
) -> Iterator[dg.AssetMaterialization | dg.MaterializeResult[None]]:
    """Train (or continue) the drafter of the training set."""
    workspace = recipe.open()
    derived = workspace.derived
    checkpoint = children.train(context, workspace, Job(config.training_set, config.accept_failed_gate))
    known = set(context.instance.get_dynamic_partitions(PARTITIONS_NAME))
    remember(context.instance, PARTITIONS_NAME, [f.partition for f in checkpoint.coverage if f.partition not in known])
    version = checkpoint.weights.sha256
    for file in checkpoint.coverage:
        yield dg.AssetMaterialization(
            asset_key=drafter_coverage.key,
            partition=file.partition,
            metadata={
                "rows": file.rows,
                "tokens": file.tokens,
                "blocks": file.blocks,
                "mean loss": round(file.mean_loss, 4),
                "joint accepted prefix": round(file.joint_accepted_prefix, 3),
                "training set": checkpoint.training_set,
                "checkpoint": checkpoint.run,
            },
            tags=version_tags(version, checkpoint.code_version, {drafter_checkpoint.key: version}),
        )
    yield dg.MaterializeResult(
        data_version=dg.DataVersion(version),
        metadata={
            **file_uri(derived.uri(checkpoint.weights.key)),
            "run": checkpoint.run,
            "recipe": checkpoint.recipe,
            **_settings(checkpoint, derived),
            "code version": checkpoint.code_version,
            "sha256": version,
            "training set": checkpoint.training_set,
            "gate": checkpoint.gate,
            "target fingerprint": checkpoint.target_fingerprint,
            "steps": checkpoint.steps,
            "seconds": round(checkpoint.train_s, 1),
            "final loss": round(checkpoint.final_loss, 4),
            "held-out accepted prefix": round(checkpoint.held_out_accepted_prefix, 3),
            "skipped steps": checkpoint.skipped_steps,
            "skipped rows": checkpoint.skipped_rows,
            "best step": checkpoint.best_step,
            "metrics": derived.uri(checkpoint.metrics.key),
            **({} if checkpoint.curve is None else {"learning curve": picture(derived.read(checkpoint.curve))}),
            "files": len(checkpoint.coverage),
            "worst files": _worst(checkpoint),
        },
    )


def _settings(checkpoint: DrafterCheckpoint, derived: Store) -> dict[str, str]:
    """The recipe as it was then."""
    stored = checkpoint.settings
    return {"recipe as it was": derived.uri(stored.key), "recipe sha256": stored.sha256} if stored else {}


def _worst(checkpoint: DrafterCheckpoint) -> dg.TableMetadataValue:
    """The files that the drafter learned least."""
    learned = sorted((file for file in checkpoint.coverage if file.blocks), key=lambda f: f.joint_accepted_prefix)
    return table(
        [
            {
                "partition": file.partition,
                "accepted prefix": round(file.joint_accepted_prefix, 3),
                "mean loss": round(file.mean_loss, 4),
                "rows": file.rows,
            }
            for file in learned[:WORST_SHOWN]
        ]
    )
