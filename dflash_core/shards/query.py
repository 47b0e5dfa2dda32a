"""Rows of all shards by what is stored of them: `dflash rows "supervised_tokens < 10 and finish_reason = 'stop'"`.

polars reads a few columns of the shards from the store, some files at a time: 1,805 files in seconds and little memory.
The ids are read only where they have to be counted: for the rows that were found, or for a condition on `tokens`.
"""

import re
from collections.abc import Mapping, Sequence

import polars as pl

from dflash_core.errors import UserError
from dflash_core.records import ShardManifest
from dflash_core.tokenization.flags import Flag
from dflash_core.workspace import Workspace

FLAGS = {(flag.name or "").lower(): flag.value for flag in Flag}
SCHEMA = {
    "file": pl.String,
    "line": pl.Int64,
    "row_id": pl.String,
    "tokens": pl.Int64,
    "prompt_tokens": pl.Int64,
    "supervised_tokens": pl.Int64,
    "finish_reason": pl.String,
    **dict.fromkeys(FLAGS, pl.Boolean),
}
COLUMNS = tuple(SCHEMA)
"""What a condition may name: `file` is the partition, `tokens` the whole row's, and each flag is true or false."""
FILES_AT_ONCE = 64
"""Polars fetches whole files ahead, so this bounds memory: 1,805 at once took 7.7 GB."""
SHOWN = ("file", "line", "row_id", "tokens", "supervised_tokens", "finish_reason")


def find_rows(workspace: Workspace, manifests: Sequence[ShardManifest], where: str) -> pl.DataFrame:
    """The rows for which a condition holds, in file order; columns `SHOWN`, and `flags` in words.

    Args:
        workspace: of the shards.
        manifests: of valid shards.
        where: what stands behind WHERE in SQL, over `COLUMNS`.

    Raises:
        UserError: the condition cannot be understood, or a shard cannot be read.
    """
    partitions = {m.shard.key: m.source.partition for m in manifests if m.rows_kept}
    condition = _condition(where)
    counted = "tokens" in condition.meta.root_names()
    try:
        # A condition may compare a row with all others (`tokens = max(tokens)`), so it is asked once, of all.
        table = _read(workspace, partitions, [name for name in COLUMNS if counted or name != "tokens"])
        found = table.filter(condition)
        if not counted:
            files = set(found["file"])
            there = {key: partition for key, partition in partitions.items() if partition in files}
            tokens = _read(workspace, there, ["file", "line", "row_id", "tokens"])
            found = found.join(tokens, on=["file", "line", "row_id"], how="left", maintain_order="left")
        flags = [pl.when(pl.col(name)).then(pl.lit(name.replace("_", " "))) for name in FLAGS]
        found = found.with_columns(flags=pl.concat_str(flags, separator=", ", ignore_nulls=True))
        return found.select(*SHOWN, "flags").sort("file", "line", maintain_order=True)
    except pl.exceptions.PolarsError as error:
        raise UserError(f"the rows cannot be searched: {_first_line(error)}") from None
    except OSError as error:
        raise UserError(f"a shard cannot be read: {_first_line(error)}") from None


def rows_table(workspace: Workspace, partitions: Mapping[str, str]) -> pl.LazyFrame:
    """All rows of some shards with the columns `COLUMNS`, not read yet.

    Args:
        workspace: of the shards.
        partitions: shard key -> partition.
    """
    derived = workspace.derived
    if not partitions:
        return pl.LazyFrame(schema=SCHEMA)
    uris = {derived.uri(key): partition for key, partition in partitions.items()}
    stored = pl.scan_ipc([*uris], storage_options=_options(workspace), include_file_paths="uri")
    return stored.select(
        pl.col("uri").replace_strict(uris, return_dtype=pl.String).alias("file"),
        pl.col("source_line").alias("line"),
        "row_id",
        pl.col("input_ids").list.len().cast(pl.Int64).alias("tokens"),
        pl.col("prompt_tokens").cast(pl.Int64),
        pl.col("completion_tokens").cast(pl.Int64).alias("supervised_tokens"),
        pl.col("finish_reason").cast(pl.String),
        *((pl.col("flags") & bit != 0).alias(name) for name, bit in FLAGS.items()),
    )


def _read(workspace: Workspace, partitions: Mapping[str, str], columns: Sequence[str]) -> pl.DataFrame:
    """Some columns of all rows, in the order of the files and of their rows."""
    keys = sorted(partitions, key=lambda key: partitions[key])
    parts = [keys[i : i + FILES_AT_ONCE] for i in range(0, len(keys), FILES_AT_ONCE)] or [[]]
    tables = (rows_table(workspace, {key: partitions[key] for key in part}).select(columns) for part in parts)
    return pl.concat([table.collect(engine="streaming") for table in tables])


def _condition(where: str) -> pl.Expr:
    """An expression over `COLUMNS` that is true or false of each row, and nothing that reads anything else.

    Raises:
        UserError: it is something else.
    """

    def refusal(why: str) -> UserError:
        return UserError(f"{where!r} is not a condition on rows: {why}; it may name {', '.join(COLUMNS)}")

    if re.search(r"\bselect\b", re.sub(r"'[^']*'|\"[^\"]*\"", "", where), re.IGNORECASE):
        raise refusal("it selects something itself")  # polars reads whatever file that names, or panics
    nothing = pl.LazyFrame(schema=SCHEMA)
    try:
        condition = pl.sql_expr(where)
        kinds = nothing.select(condition).collect_schema().dtypes()
        if kinds == [pl.Boolean]:
            nothing.filter(condition).collect()
            return condition
    except pl.exceptions.PolarsError as error:
        raise refusal(_first_line(error).partition("; valid columns")[0]) from None
    raise refusal("it is not true or false of each row")


def _first_line(error: Exception) -> str:
    """What is wrong, without the plan that polars shows, too."""
    return next(iter(str(error).splitlines()), type(error).__name__)


def _options(workspace: Workspace) -> dict[str, str]:
    """How polars' own client reaches the store that ours reaches."""
    storage, access = workspace.recipe.storage, workspace.access
    found = workspace.derived.client.meta  # what boto3 made of the recipe, the environment and ~/.aws/config
    own = None if found.endpoint_url.endswith(".amazonaws.com") else found.endpoint_url
    given = {
        "aws_endpoint_url": own,
        "aws_region": storage.region or access.region or found.region_name,
        "aws_access_key_id": access.access_key,
        "aws_secret_access_key": access.secret_key,
        "aws_session_token": access.session_token,
        "aws_profile": access.profile,
    }
    return {name: value for name, value in given.items() if value is not None} | {"aws_allow_http": "true"}
