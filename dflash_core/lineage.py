"""Where a drafter comes from, down to file and line; and which drafters learned from a file. Reads manifests only.

(And one shard, where the rows of a single file are asked for.) Tables of many files are polars frames.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from difflib import get_close_matches

import polars as pl

from dflash_core.drafter.runs import find_checkpoint
from dflash_core.errors import ObjectMissing, UserError
from dflash_core.records import DrafterCheckpoint, ShardManifest, TrainingSet
from dflash_core.shards.arrow import read_shard
from dflash_core.storage.layout import MANIFEST_FILE, RUNS, ShardKeys
from dflash_core.storage.partitions import find_files
from dflash_core.storage.s3 import Store
from dflash_core.training_set.freeze import load_training_set
from dflash_core.workspace import Workspace

Columns = dict[str, type[pl.DataType]]
LEARNED: Columns = {
    "trained_rows": pl.Int64,
    "trained_tokens": pl.Int64,
    "mean_loss": pl.Float64,
    "accepted_prefix": pl.Float64,
}


@dataclass(frozen=True)
class Lineage:
    """A drafter, the training set it was trained on, and that one's files."""

    checkpoint: DrafterCheckpoint
    training_set: TrainingSet
    files: pl.DataFrame
    """One row a file, the worst learned first: partition, source_uri, source_etag, state ("unchanged", "changed since"
    or "vanished since", by its ETag in the bucket), shard_key, shard_sha256, rows, rows_dropped and rows_rejected
    (null: it was tokenized again since), and `LEARNED` (null: the training ended before it came to a row of it)."""


def trace_drafter(workspace: Workspace, run: str | None = None) -> Lineage:
    """The chain behind a drafter.

    Args:
        workspace: names the stores.
        run: of the training; None: the latest.

    Raises:
        UserError: no such run, or its training set is gone.
    """
    checkpoint = find_checkpoint(workspace.derived, run)
    frozen = load_training_set(workspace.derived, checkpoint.training_set)
    shards = pl.DataFrame(
        {
            "partition": [shard.partition for shard in frozen.shards],
            "source_uri": [shard.source_uri for shard in frozen.shards],
            "source_etag": [shard.source_etag for shard in frozen.shards],
            "shard_key": [shard.shard.key for shard in frozen.shards],
            "shard_sha256": [shard.shard.sha256 for shard in frozen.shards],
            "rows": [shard.rows for shard in frozen.shards],
        }
    )
    now = pl.DataFrame(
        [(source.partition, source.etag) for source in find_files(workspace.source)],
        schema={"partition": pl.String, "etag_now": pl.String},
        orient="row",
    )
    state = (
        pl.when(pl.col("etag_now").is_null())
        .then(pl.lit("vanished since"))
        .when(pl.col("etag_now") == pl.col("source_etag"))
        .then(pl.lit("unchanged"))
        .otherwise(pl.lit("changed since"))
    )
    files = (
        shards.join(now, on="partition", how="left", maintain_order="left")
        .with_columns(state=state)
        .join(_manifests(workspace, frozen), on=("partition", "shard_sha256"), how="left", maintain_order="left")
        .join(_coverage(checkpoint), on="partition", how="left", maintain_order="left")
        .sort("accepted_prefix", nulls_last=True, maintain_order=True)
    )
    return Lineage(checkpoint, frozen, files.drop("etag_now"))


def trace_rows(workspace: Workspace, lineage: Lineage, partition: str) -> pl.DataFrame:
    """Every row that a file gave to a training set: line, row_id, tokens, supervised_tokens.

    Raises:
        UserError: the drafter was not trained on the file.
        ObjectMissing, ObjectCorrupt: the shard is not there any more as it was frozen.
    """
    stored = next((shard.shard for shard in lineage.training_set.shards if shard.partition == partition), None)
    if stored is None:
        raise UserError(
            f"{lineage.checkpoint.run} was not trained on {partition}; it was on {len(lineage.files)} files, for "
            f"example {lineage.files['partition'][0]}"
        )
    table = pl.from_arrow(read_shard(workspace.derived.read(stored)))
    assert isinstance(table, pl.DataFrame)
    return table.select(
        pl.col("source_line").alias("line"),
        "row_id",
        pl.col("input_ids").list.len().alias("tokens"),
        pl.col("completion_tokens").alias("supervised_tokens"),
    )


def drafters_of(workspace: Workspace, partition: str) -> pl.DataFrame:
    """Every finished drafter that was trained on a file, and what it took from it: run, training_set and `LEARNED`.

    Raises:
        UserError: neither the source nor a finished drafter has such a file.
        StorageError: the store cannot be read.
    """
    found = pl.DataFrame(schema={"run": pl.String, "training_set": pl.String, **LEARNED})
    for checkpoint in _finished(workspace.derived):
        of_file = _coverage(checkpoint).filter(pl.col("partition") == partition).drop("partition")
        whose = (pl.lit(checkpoint.run).alias("run"), pl.lit(checkpoint.training_set).alias("training_set"))
        found.extend(of_file.select(*whose, *LEARNED))
    if found.is_empty():
        keys = [file.partition for file in find_files(workspace.source)]
        if partition not in keys:
            near = get_close_matches(partition, keys, 3) or keys[:1]
            raise UserError(
                f"no file {partition} in {workspace.source.uri('')} and none in a finished drafter; "
                + (f"do you mean {' or '.join(near)}?" if near else "there is no file at all")
            )
    return found


def _coverage(checkpoint: DrafterCheckpoint) -> pl.DataFrame:
    """What a training took from each file: partition and `LEARNED`."""
    return pl.DataFrame(
        [(f.partition, f.rows, f.tokens, f.mean_loss, f.joint_accepted_prefix) for f in checkpoint.coverage],
        schema={"partition": pl.String, **LEARNED},
        orient="row",
    )


def _manifests(workspace: Workspace, frozen: TrainingSet) -> pl.DataFrame:
    """What was left out of each file's shard, as its manifest says now."""

    def read(partition: str) -> ShardManifest | None:
        return workspace.derived.find_record(ShardKeys(frozen.fingerprint, partition).manifest, ShardManifest)

    with ThreadPoolExecutor(workspace.recipe.storage.downloads) as pool:
        found = list(pool.map(read, [shard.partition for shard in frozen.shards]))
    return pl.DataFrame(
        [(m.source.partition, m.shard.sha256, m.rows_dropped, m.rows_rejected) for m in found if m is not None],
        schema={
            "partition": pl.String,
            "shard_sha256": pl.String,
            "rows_dropped": pl.Int64,
            "rows_rejected": pl.Int64,
        },
        orient="row",
    )


def _finished(derived: Store) -> Iterator[DrafterCheckpoint]:
    for listed in derived.list(RUNS):
        if listed.key.endswith(f"/{MANIFEST_FILE}") and listed.key.removeprefix(RUNS).count("/") == 1:
            try:
                yield derived.get_record(listed.key, DrafterCheckpoint)
            except ObjectMissing:
                continue
