"""training_set: one manifest over all valid shards, with the gate's verdict as part of it.

It runs apart from the partitions' backfill and takes what is there: a failed file lowers the coverage, it does not stop
the lineage. A failing verdict is written too; training refuses it.
"""

import dagster as dg

from dflash_assets.completion_files import loss_mask_stats, tokenized_shards
from dflash_assets.metadata import GROUP, bullets, file_uri, lost_rows, picture
from dflash_assets.resources import RecipeResource
from dflash_core.errors import UserError
from dflash_core.records import TrainingSet
from dflash_core.storage.layout import TrainingSetKeys
from dflash_core.training_set.freeze import freeze_training_set


class TrainingSetConfig(dg.Config):
    """What to freeze; nothing given: what the recipe says, else every source file."""

    partitions: list[str] | None = None
    """Keys, patterns (part-0*) and ranges (part-007..part-031)."""


@dg.asset(
    deps=[tokenized_shards, loss_mask_stats],
    description="The frozen selection of shards that a drafter is trained on, and the gate's verdict on them.",
    group_name=GROUP,
    kinds={"s3", "polars"},
    tags={"stage": "quality"},
    owners=["team:data"],
    check_specs=[
        dg.AssetCheckSpec("gate", asset="training_set", description="The recipe's thresholds hold."),
        dg.AssetCheckSpec("coverage", asset="training_set", description="Every source file is in it."),
    ],
)
def training_set(
    context: dg.AssetExecutionContext, recipe: RecipeResource, config: TrainingSetConfig
) -> dg.MaterializeResult:  # type: ignore[type-arg]
    """Freeze the valid shards and judge them."""
    workspace = recipe.open()
    try:
        frozen = freeze_training_set(workspace, config.partitions)
    except UserError as error:
        raise dg.Failure(str(error), allow_retries=False) from None
    for reason in frozen.verdict.reasons:
        context.log.warning(f"gate: {reason}")
    derived, keys = workspace.derived, TrainingSetKeys(frozen.hash)
    return dg.MaterializeResult(
        data_version=dg.DataVersion(frozen.hash),
        metadata={
            **file_uri(derived.uri(keys.manifest)),
            "hash": frozen.hash,
            "verdict": "pass" if frozen.verdict.passed else "fail",
            "gate reasons": bullets(frozen.verdict.reasons),
            "picture": picture(derived.get(keys.picture).body),
            "report": derived.uri(keys.report),
            "files": len(frozen.shards),
            "files missing": len(frozen.missing),
            "coverage": frozen.coverage,
            "dagster/row_count": frozen.rows_kept,
            **lost_rows(frozen),
            "tokens": frozen.tokens,
            "supervised tokens": frozen.supervised_tokens,
        },
        check_results=[_gate_check(frozen), _coverage_check(frozen)],
    )


def _gate_check(frozen: TrainingSet) -> dg.AssetCheckResult:
    return dg.AssetCheckResult(
        check_name="gate",
        passed=frozen.verdict.passed,
        description="; ".join(frozen.verdict.reasons) or None,
        metadata={"reasons": bullets(frozen.verdict.reasons)},
    )


def _coverage_check(frozen: TrainingSet) -> dg.AssetCheckResult:
    return dg.AssetCheckResult(
        check_name="coverage",
        passed=not frozen.missing,
        severity=dg.AssetCheckSeverity.WARN,
        metadata={"coverage": frozen.coverage, "missing": bullets(frozen.missing)},
    )
