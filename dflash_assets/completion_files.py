"""raw_completions, tokenized_shards, loss_mask_stats: what becomes of one source file, in one pass over it.

The three come from one op, so that a file is downloaded once and one bad file fails alone: every good partition is
reported the moment it is done, the bad ones are named in the failure at the end, and "Failed and missing" in the UI
reruns exactly those. (As separate assets with one backfill policy they would share runs, and one bad key would turn
every downstream key red.)
"""

from collections.abc import Iterator

import dagster as dg

from dflash_assets.failures import failure, observations, stopped_before
from dflash_assets.metadata import GROUP, file_uri, lost_rows, picture, version_tags
from dflash_assets.partitions import FILES_PER_RUN, completion_files, sources_of
from dflash_assets.resources import RecipeResource
from dflash_core import TOKENIZATION_VERSION
from dflash_core.errors import UserError
from dflash_core.records import ShardManifest
from dflash_core.reports.file_picture import file_picture
from dflash_core.shards.arrow import SCHEMA, broken_promises, read_shard
from dflash_core.shards.pipeline import tokenize_files
from dflash_core.shards.workers import FileDone
from dflash_core.statistics.histogram import at_most, quantiles
from dflash_core.storage.s3 import Store
from dflash_core.workspace import Workspace

OWNERS = ["team:data"]

raw_completions = dg.AssetSpec(
    "raw_completions",
    deps=["generated_completions"],
    description="A file of completions as the target model wrote it: read whole, hashed, every line kept or rejected.",
    group_name=GROUP,
    kinds={"s3"},
    tags={"stage": "completions"},
    owners=OWNERS,
    code_version=TOKENIZATION_VERSION,
    skippable=True,
)
tokenized_shards = dg.AssetSpec(
    "tokenized_shards",
    deps=["raw_completions"],
    description="Token ids and loss spans of every row, rendered as serving renders them; an Arrow file.",
    group_name=GROUP,
    kinds={"arrow", "s3"},
    tags={"stage": "tokenization"},
    owners=OWNERS,
    metadata={
        "dagster/column_schema": dg.TableSchema([dg.TableColumn(field.name, str(field.type)) for field in SCHEMA])
    },
    code_version=TOKENIZATION_VERSION,
    skippable=True,
)
loss_mask_stats = dg.AssetSpec(
    "loss_mask_stats",
    deps=["tokenized_shards"],
    description="What the loss will see: supervised tokens a row, lengths, finish reasons, duplicates, the spike.",
    group_name=GROUP,
    kinds={"s3"},
    tags={"stage": "quality"},
    owners=OWNERS,
    code_version=TOKENIZATION_VERSION,
    skippable=True,
)

FILE_ASSETS = (raw_completions.key, tokenized_shards.key, loss_mask_stats.key)

rows_conserved = dg.AssetCheckSpec(
    "rows_conserved",
    asset="tokenized_shards",
    description="Rows read = rows kept + rows dropped + rows rejected, file by file.",
    blocking=True,
)
mask_invariants = dg.AssetCheckSpec(
    "mask_invariants",
    asset="tokenized_shards",
    description="Loss masks keep their promises, in every row of a sample of the run's shards.",
    blocking=True,
)
SAMPLED_SHARDS = 3


@dg.multi_asset(
    name="completion_files",
    specs=[raw_completions, tokenized_shards, loss_mask_stats],
    check_specs=[rows_conserved, mask_invariants],
    partitions_def=completion_files,
    backfill_policy=dg.BackfillPolicy.multi_run(FILES_PER_RUN),
    can_subset=True,
    pool="cpu",
)
def completion_file_assets(
    context: dg.AssetExecutionContext, recipe: RecipeResource
) -> Iterator[dg.AssetMaterialization | dg.AssetObservation | dg.AssetCheckResult]:
    """Tokenize the files of this run's partitions, all cores, and report each as soon as it is done."""
    failed: dict[str, str] = {}
    manifests: list[ShardManifest] = []
    stopped = ""
    try:
        workspace = recipe.open()
        sources, gone = sources_of(workspace, context.partition_keys)
        for partition in gone:
            failed[partition] = "its source file is gone, or not generated yet"
            yield from observations(context, partition, failed[partition], None)
        for outcome in tokenize_files(workspace, sources):
            if isinstance(outcome, FileDone):
                manifests.append(outcome.manifest)
                yield from _materializations(context, workspace, outcome)
            else:
                failed[outcome.source.partition] = outcome.reason
                yield from observations(context, outcome.source.partition, outcome.reason, outcome.source.etag)
        if mask_invariants.key in context.selected_asset_check_keys:
            yield _invariants(workspace.derived, manifests)
    except (UserError, dg.Failure) as error:
        stopped = str(error)
        done = {manifest.source.partition for manifest in manifests}
        rest = [partition for partition in context.partition_keys if partition not in done and partition not in failed]
        yield from stopped_before(raw_completions.key, rest, stopped)
    if rows_conserved.key in context.selected_asset_check_keys:
        yield _conservation(manifests)
    if failed or stopped:
        raise failure(failed, stopped, len(context.partition_keys))


def _materializations(
    context: dg.AssetExecutionContext, workspace: Workspace, done: FileDone
) -> Iterator[dg.AssetMaterialization]:
    manifest, statistics, derived = done.manifest, done.statistics, workspace.derived
    near_empty = at_most(statistics.supervised, workspace.recipe.gate.near_empty_tokens)
    versions: dict[dg.AssetKey, tuple[str, dict[str, dg.MetadataValue | str | int | float | bool]]] = {
        raw_completions.key: (
            manifest.source_sha256,
            {
                **file_uri(done.source.uri),
                "etag": done.source.etag,
                "sha256": manifest.source_sha256,
                "bytes": done.source.size,
                "dagster/row_count": manifest.rows_read,
            },
        ),
        tokenized_shards.key: (
            manifest.shard.sha256,
            {
                **file_uri(derived.uri(manifest.shard.key)),
                "sha256": manifest.shard.sha256,
                "fingerprint": manifest.fingerprint,
                "rejects": derived.uri(manifest.rejects.key),
                "dagster/row_count": manifest.rows_kept,
                **lost_rows(manifest),
                "tokens": manifest.tokens,
                "supervised tokens": manifest.supervised_tokens,
            },
        ),
        loss_mask_stats.key: (
            manifest.statistics.sha256,
            {
                **file_uri(derived.uri(manifest.statistics.key)),
                "sha256": manifest.statistics.sha256,
                "rows rendered": statistics.rows_rendered,
                "median supervised tokens": quantiles(statistics.supervised)["median"],
                "near-empty share": round(near_empty / statistics.rows_rendered, 4),
                "picture": picture(file_picture(statistics), "svg+xml"),
            },
        ),
    }
    used = {key: version for key, (version, _) in versions.items()}
    used[dg.AssetKey("generated_completions")] = manifest.source_sha256
    for key, (version, metadata) in versions.items():
        if key in context.selected_asset_keys:
            made_from = {dep: used[dep] for dep in context.assets_def.asset_deps[key]}
            last_event = context.instance.event_log_storage.get_maximum_record_id() if made_from else None
            yield dg.AssetMaterialization(
                asset_key=key,
                partition=done.source.partition,
                metadata={**metadata, "skipped, still valid": done.skipped, "seconds": round(done.seconds, 3)},
                tags=version_tags(version, TOKENIZATION_VERSION, made_from, last_event),
            )


def _conservation(manifests: list[ShardManifest]) -> dg.AssetCheckResult:
    wrong = [
        m.source.partition for m in manifests if m.rows_read != m.rows_kept + (m.rows_dropped or 0) + m.rows_rejected
    ]
    return dg.AssetCheckResult(
        asset_key=tokenized_shards.key,
        check_name=rows_conserved.name,
        passed=not wrong,
        metadata={
            "files": len(manifests),
            "rows read": sum(m.rows_read for m in manifests),
            "rows kept": sum(m.rows_kept for m in manifests),
            "rows dropped": sum(m.rows_dropped or 0 for m in manifests),
            "rows rejected": sum(m.rows_rejected for m in manifests),
            "files that lost rows": dg.MetadataValue.json(wrong),
        },
    )


def _invariants(derived: Store, manifests: list[ShardManifest]) -> dg.AssetCheckResult:
    """Read a few of the run's shards back, spread over its files."""
    sample = sorted(manifests, key=lambda m: m.source.partition)[:: max(1, len(manifests) // SAMPLED_SHARDS)]
    broken: dict[str, dict[str, int]] = {}
    for manifest in sample[:SAMPLED_SHARDS]:
        found = broken_promises(read_shard(derived.read(manifest.shard)))
        if found:
            broken[manifest.source.partition] = found
    return dg.AssetCheckResult(
        asset_key=tokenized_shards.key,
        check_name=mask_invariants.name,
        passed=not broken,
        metadata={
            "shards": min(len(sample), SAMPLED_SHARDS),
            "rows": sum(manifest.rows_kept for manifest in sample[:SAMPLED_SHARDS]),
            "rows that break a promise": dg.MetadataValue.json(broken),
        },
    )
