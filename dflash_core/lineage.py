"""Where a drafter comes from, down to file and line; and which drafters learned from a file. Reads manifests only.

(And one shard, where the rows of a single file are asked for.)
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from difflib import get_close_matches

from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table
from rich.tree import Tree

from dflash_core.drafter.runs import find_checkpoint
from dflash_core.errors import ObjectMissing, UserError
from dflash_core.quality.training_set import load_training_set, manifest_key
from dflash_core.recipe import Recipe
from dflash_core.records import DrafterCheckpoint, FileCoverage, ShardManifest, TrainingSet, TrainingSetShard
from dflash_core.storage.keys import named_partition
from dflash_core.storage.store import Store, find_files, open_stores
from dflash_core.tokenization.shards import read_shard


@dataclass(frozen=True)
class FileLineage:
    """One source file's part in a drafter."""

    shard: TrainingSetShard
    coverage: FileCoverage | None
    """None: the training ended before it came to a row of this file."""
    rejected: int | None
    """Lines that became no row; None: its shard has been made anew since."""
    now: str
    """"unchanged", "changed since" or "vanished since", by its ETag in the bucket."""


@dataclass(frozen=True)
class Lineage:
    """A drafter, the training set it was trained on, and that one's files."""

    checkpoint: DrafterCheckpoint
    training_set: TrainingSet
    files: tuple[FileLineage, ...]
    """Sorted by accepted prefix, the worst first."""


@dataclass(frozen=True)
class TracedRow:
    """A row of a shard and the line it came from."""

    line: int
    row_id: str
    tokens: int
    supervised_tokens: int


def trace_drafter(recipe: Recipe, run: str | None = None) -> Lineage:
    """The chain behind a drafter.

    Args:
        recipe: names the stores.
        run: of the training; None: the latest.

    Raises:
        UserError: no such run, or its training set is gone.
    """
    stores = open_stores(recipe)
    checkpoint = find_checkpoint(stores.derived, run)
    frozen = load_training_set(recipe, checkpoint.training_set)
    now = {source.partition: source.etag for source in find_files(stores.source)}
    learned = {file.partition: file for file in checkpoint.coverage}

    def trace(shard: TrainingSetShard) -> FileLineage:
        manifest = stores.derived.find_record(manifest_key(frozen.fingerprint, shard.partition), ShardManifest)
        same = manifest is not None and manifest.shard.sha256 == shard.shard.sha256
        etag = now.get(shard.partition)
        state = "vanished since" if etag is None else "unchanged" if etag == shard.source_etag else "changed since"
        return FileLineage(
            shard, learned.get(shard.partition), manifest.rows_rejected if manifest and same else None, state
        )

    with ThreadPoolExecutor(recipe.storage.downloads) as pool:
        files = list(pool.map(trace, frozen.shards))
    files.sort(key=lambda file: file.coverage.joint_accepted_prefix if file.coverage else float("inf"))
    return Lineage(checkpoint, frozen, tuple(files))


def trace_rows(recipe: Recipe, shard: TrainingSetShard) -> list[TracedRow]:
    """Every row that a file gave to a training set.

    Raises:
        ObjectMissing, ObjectCorrupt: the shard is not there any more as it was frozen.
    """
    table = read_shard(open_stores(recipe).derived.read(shard.shard))
    lengths = table.column("input_ids").combine_chunks().value_lengths().to_pylist()
    lines, names, supervised = (
        table.column(name).to_pylist() for name in ("source_line", "row_id", "completion_tokens")
    )
    return [TracedRow(*row) for row in zip(lines, names, lengths, supervised, strict=True)]


def drafters_of(recipe: Recipe, partition: str) -> list[tuple[DrafterCheckpoint, FileCoverage]]:
    """Every finished drafter that was trained on a file, and what it took from it.

    Raises:
        UserError: neither the source nor a finished drafter has such a file.
        StorageError: the store cannot be read.
    """
    stores = open_stores(recipe)
    found = []
    for checkpoint in _finished(stores.derived):
        found += [(checkpoint, file) for file in checkpoint.coverage if file.partition == partition]
    if not found:
        keys = [file.partition for file in find_files(stores.source)]
        if partition not in keys:
            near = get_close_matches(partition, keys, 3) or keys[:1]
            raise UserError(
                f"no file {partition} in {stores.source.uri('')} and none in a finished drafter; "
                + (f"do you mean {' or '.join(near)}?" if near else "there is no file at all")
            )
    return found


def require_file(lineage: Lineage, partition: str) -> FileLineage:
    """One file of a lineage.

    Raises:
        UserError: the drafter was not trained on it.
    """
    for file in lineage.files:
        if file.shard.partition == partition:
            return file
    raise UserError(
        f"{lineage.checkpoint.run} was not trained on {partition}; it was on {len(lineage.files)} files, for example "
        f"{lineage.files[0].shard.partition}"
    )


def lineage_tree(lineage: Lineage, derived: Store, shown: int) -> Tree:
    """The chain for a terminal: the drafter, what it was made with, its training set, its files."""
    checkpoint, frozen = lineage.checkpoint, lineage.training_set
    weights = f"{escape(derived.uri(checkpoint.weights.key))}  sha256 {checkpoint.weights.sha256[:12]}"
    tree = Tree(f"[bold]{checkpoint.run}[/]  {weights}")
    settings = checkpoint.settings
    stored = f" ({escape(derived.uri(settings.key))}  sha256 {settings.sha256[:12]})" if settings else ""
    tree.add(f"recipe {checkpoint.recipe}{stored}, training code {checkpoint.code_version}, {checkpoint.steps:,} steps")
    tree.add(f"target {checkpoint.target_fingerprint}")
    branch = tree.add(
        f"[bold]training set {frozen.hash}[/], gate {checkpoint.gate}: {frozen.rows_kept:,} rows of "
        f"{len(frozen.shards)} files, coverage {frozen.coverage:.3f}, tokenization {frozen.fingerprint}"
    )
    for file in lineage.files[:shown]:
        add_file(branch, file, derived)
    if len(lineage.files) > shown:
        branch.add(f"and {len(lineage.files) - shown:,} more files (--all)")
    return tree


def add_file(branch: Tree, file: FileLineage, derived: Store) -> Tree:
    """One file: source, shard, and what was learned from it."""
    shard, learned = file.shard, file.coverage
    colour = "green" if file.now == "unchanged" else "red"
    node = branch.add(f"[bold]{escape(shard.source_uri)}[/]  ETag {shard.source_etag[:12]}  [{colour}]{file.now}[/]")
    rejected = "made anew since" if file.rejected is None else f"{file.rejected:,} lines rejected"
    stored = f"{escape(derived.uri(shard.shard.key))}  sha256 {shard.shard.sha256[:12]}"
    node.add(f"shard {stored}  {shard.rows:,} rows, {rejected}")
    if learned is None:
        node.add("[yellow]no row was trained on[/]")
    else:
        node.add(
            f"learned from {learned.rows:,} rows, {learned.tokens:,} tokens: mean loss {learned.mean_loss:.3f}, "
            f"accepted prefix {learned.joint_accepted_prefix:.2f}"
        )
    return node


def add_rows(node: Tree, file: FileLineage, rows: Sequence[TracedRow]) -> None:
    """Every row with the line of the source file it came from."""
    for row in rows:
        where = escape(f"{file.shard.source_uri}:{row.line}  {row.row_id}")
        node.add(f"{where}  {row.tokens:,} tokens, {row.supervised_tokens:,} supervised")


def lineage_report(recipe: Recipe, run: str | None, file: str | None, shown: int) -> RenderableType:
    """What `dflash lineage` shows: the chain of a drafter, all rows of one of its files, or a file's drafters.

    Args:
        recipe: names the stores.
        run: of the training; None: the latest.
        file: a partition key or the path below the source prefix; None: all files.
        shown: so many files at most.

    Raises:
        UserError: no such run or file.
    """
    derived = open_stores(recipe).derived
    if file is None:
        return lineage_tree(trace_drafter(recipe, run), derived, shown)
    partition = named_partition(file)
    if run is None:
        return _drafters_table(partition, drafters_of(recipe, partition))
    lineage = trace_drafter(recipe, run)
    traced = require_file(lineage, partition)
    tree = lineage_tree(replace(lineage, files=(traced,)), derived, 1)
    add_rows(tree.children[-1].children[-1], traced, trace_rows(recipe, traced.shard))
    return tree


def _drafters_table(partition: str, found: Sequence[tuple[DrafterCheckpoint, FileCoverage]]) -> RenderableType:
    if not found:
        return f"no finished drafter was trained on {escape(partition)}"
    table = Table("drafter", "training set", "rows", "tokens", "mean loss", "accepted prefix", title=escape(partition))
    for checkpoint, file in found:
        numbers = (f"{file.rows:,}", f"{file.tokens:,}", f"{file.mean_loss:.3f}", f"{file.joint_accepted_prefix:.2f}")
        table.add_row(checkpoint.run, checkpoint.training_set, *numbers)
    return table


def _finished(derived: Store) -> Iterator[DrafterCheckpoint]:
    for key, _, _ in derived.list("drafter_checkpoint/"):
        if key.endswith("/manifest.json") and key.count("/") == 2:
            try:
                yield derived.get_record(key, DrafterCheckpoint)
            except ObjectMissing:
                continue
