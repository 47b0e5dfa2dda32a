"""Checks that look beyond one run: whether shards, training set and drafter are still of the files in the bucket.

A changed object makes its shard, the training set and the drafter stale, and Dagster cannot see it (it does not look
into the bucket, and beyond a hundred partitions it does not compute staleness). These checks compare ETags, and the
shards' and the drafter's also how their rows were made. They run with their asset or alone; the sensor that sees a
change reports those of the training set and the drafter, too. (Not the shards': it reads every file's manifest, and the
sensor has the changed ones made again.)
"""

from collections.abc import Callable, Sequence

import dagster as dg

from dflash_assets.completion_files import tokenized_shards
from dflash_assets.metadata import bullets
from dflash_assets.quarantine import QUARANTINE, failed_files, quarantine_verdict
from dflash_assets.resources import RecipeResource
from dflash_core.drafter.runs import find_checkpoint
from dflash_core.errors import ObjectMissing, UserError
from dflash_core.records import SourceFile, TrainingSet
from dflash_core.shards.state import ShardProblem, ShardState, invalid_shards
from dflash_core.storage.layout import LATEST_TRAINING_SET
from dflash_core.storage.partitions import list_sources
from dflash_core.tokenization.tokenizer import fingerprint
from dflash_core.training_set.drift import drift_of
from dflash_core.training_set.freeze import load_training_set
from dflash_core.workspace import Workspace

SHARDS_CURRENT = dg.AssetCheckKey(tokenized_shards.key, "shards_current")
SOURCES_CURRENT = dg.AssetCheckKey(dg.AssetKey("training_set"), "sources_current")
TRAINED_ON_CURRENT = dg.AssetCheckKey(dg.AssetKey("drafter_checkpoint"), "trained_on_current_shards")


@dg.asset_check(
    asset=SHARDS_CURRENT.asset_key,
    name=SHARDS_CURRENT.name,
    description="Every shard is whole, and of its source file as it is in the bucket, made as the recipe says.",
)
def shards_current(context: dg.AssetCheckExecutionContext, recipe: RecipeResource) -> dg.AssetCheckResult:
    """The shards that Dagster shows as materialized against the bucket."""
    workspace = recipe.open()
    try:
        stale = stale_shards(context.instance, workspace, list_sources(workspace.source))
    except UserError as error:
        raise dg.Failure(str(error), allow_retries=False) from None
    return dg.AssetCheckResult(
        passed=not stale,
        severity=dg.AssetCheckSeverity.WARN,
        description=f"{len(stale)} are not; materialize them again" if stale else None,
        metadata={"stale": len(stale), "files": bullets([f"{key}: {stale_reason(s)}" for key, s in stale.items()])},
    )


def stale_shards(
    instance: dg.DagsterInstance, workspace: Workspace, sources: Sequence[SourceFile]
) -> dict[str, ShardState]:
    """Partitions that were materialized and whose shard is not whole, or not what it would be made now; sorted.

    Raises:
        UserError: the store or the target's folder cannot be read.
    """
    made = instance.get_materialized_partitions(tokenized_shards.key)
    known = [source for source in sources if source.partition in made]
    if not known:
        return {}
    recipe = workspace.recipe
    found = invalid_shards(workspace.derived, fingerprint(recipe), known, recipe.storage.downloads)
    return {partition: state for partition, state in found.items() if state.problem != ShardProblem.WITHOUT_ROW}


def stale_reason(state: ShardState) -> str:
    """Why a shard that was materialized is stale."""
    made_otherwise = state.problem == ShardProblem.NOT_TOKENIZED
    return "made in another way than the recipe now says" if made_otherwise else state.reason


@dg.asset_check(
    asset=SOURCES_CURRENT.asset_key, name=SOURCES_CURRENT.name, description="Its source files are as they were frozen."
)
def sources_current(recipe: RecipeResource) -> dg.AssetCheckResult:
    """The training set against the bucket."""
    return _result(recipe.open(), SOURCES_CURRENT)


@dg.asset_check(
    asset=TRAINED_ON_CURRENT.asset_key,
    name=TRAINED_ON_CURRENT.name,
    description="Its source files are as it learned from them, and the recipe still makes the same rows of them.",
)
def trained_on_current_shards(recipe: RecipeResource) -> dg.AssetCheckResult:
    """The drafter's training set against the bucket."""
    return _result(recipe.open(), TRAINED_ON_CURRENT)


@dg.asset_check(asset=QUARANTINE.asset_key, name=QUARANTINE.name, description="No file has failed for good.")
def nothing_quarantined(context: dg.AssetCheckExecutionContext, recipe: RecipeResource) -> dg.AssetCheckResult:
    """The files that are tried no more, with their reasons."""
    workspace = recipe.open()
    try:
        etags = {source.partition: source.etag for source in list_sources(workspace.source)}
    except UserError as error:
        raise dg.Failure(str(error), allow_retries=False) from None
    found = quarantine_verdict(failed_files(context.instance, etags, workspace.recipe.automation.max_attempts))
    return dg.AssetCheckResult(
        passed=found.passed, severity=found.severity, description=found.description, metadata=found.metadata
    )


def drift_evaluation(
    workspace: Workspace, sources: Sequence[SourceFile], note: Callable[[str], None]
) -> list[dg.AssetCheckEvaluation]:
    """Both verdicts for a listing, as events that belong to no run; none for what does not exist yet.

    One that cannot be given, because its training set is gone or damaged, is told to `note` and leaves the other alone.
    """
    found = []
    for key in (SOURCES_CURRENT, TRAINED_ON_CURRENT):
        try:
            frozen = _frozen(workspace, key)
            if frozen is None:
                continue
            verdict = _verdict(workspace, key, frozen, sources)
        except UserError as error:
            note(f"no verdict on {key.to_user_string()}: {error}")
            continue
        found.append(
            dg.AssetCheckEvaluation(
                asset_key=key.asset_key,
                check_name=key.name,
                passed=verdict.passed,
                severity=verdict.severity,
                description=verdict.description,
                metadata=verdict.metadata,
            )
        )
    return found


def _result(workspace: Workspace, key: dg.AssetCheckKey) -> dg.AssetCheckResult:
    try:
        frozen = _frozen(workspace, key)
        if frozen is None:
            return dg.AssetCheckResult(passed=True, description="nothing of that kind yet")
        return _verdict(workspace, key, frozen, list_sources(workspace.source))
    except UserError as error:
        raise dg.Failure(str(error), allow_retries=False) from None


def _verdict(
    workspace: Workspace, key: dg.AssetCheckKey, frozen: TrainingSet, sources: Sequence[SourceFile]
) -> dg.AssetCheckResult:
    drift = drift_of(frozen, sources)
    found = [str(drift)]
    now = fingerprint(workspace.recipe) if key == TRAINED_ON_CURRENT else frozen.fingerprint
    if now != frozen.fingerprint:
        found.append(f"its rows have the fingerprint {frozen.fingerprint}, the recipe now makes {now}")
    return dg.AssetCheckResult(
        passed=not drift.stale and now == frozen.fingerprint,
        severity=dg.AssetCheckSeverity.WARN,
        description="; ".join(found),
        metadata={
            "training set": frozen.hash,
            "files changed": len(drift.changed),
            "files vanished": len(drift.vanished),
            "files new": len(drift.new),
            "changed": bullets(drift.changed),
            "vanished": bullets(drift.vanished),
        },
    )


def _frozen(workspace: Workspace, key: dg.AssetCheckKey) -> TrainingSet | None:
    """The training set that the check is about: the latest, or the latest drafter's."""
    derived = workspace.derived
    try:
        if key == SOURCES_CURRENT:
            derived.get(LATEST_TRAINING_SET)
            return load_training_set(derived)
        return load_training_set(derived, find_checkpoint(derived, None).training_set)
    except ObjectMissing:
        return None
