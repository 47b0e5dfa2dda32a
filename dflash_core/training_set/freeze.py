"""Freeze the valid shards of a source into one manifest with the gate's verdict in it; training trusts nothing else.

Freezing reads manifests and statistics only, never a shard, so 1,805 files take seconds. The set's name is a hash of
its content without any time in it: freezing the same shards under the same recipe again gives the same set.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

from dflash_core.errors import GateError, ObjectCorrupt, ObjectMissing, UserError
from dflash_core.records import (
    ShardManifest,
    StoredObject,
    TrainingSet,
    TrainingSetPointer,
    TrainingSetShard,
)
from dflash_core.reports.file_picture import file_picture
from dflash_core.reports.pages import FILES_PICTURED, training_set_page, worst_files
from dflash_core.shards.state import ShardProblem, ShardState, read_statistics, shard_states
from dflash_core.statistics.statistics import FileStatistics, MergedStatistics, add_counts
from dflash_core.storage.layout import LATEST_TRAINING_SET, TRAINING_SETS, TrainingSetKeys
from dflash_core.storage.partitions import list_sources, select_files
from dflash_core.storage.s3 import Store
from dflash_core.tokenization.tokenizer import fingerprint
from dflash_core.training_set.gate import judge
from dflash_core.workspace import Workspace

NOTHING_STORED = StoredObject(key="", size=0, sha256="")
"""Stands for the statistics until the set has a name."""


@dataclass(frozen=True)
class ShardWithStatistics:
    """A whole shard of the source file as it is now, maybe without a row."""

    manifest: ShardManifest
    statistics: FileStatistics


def freeze_training_set(workspace: Workspace, partitions: Sequence[str] | None = None) -> TrainingSet:
    """Freeze all valid shards of the source, or of the given partitions, and store set, statistics and report.

    A file whose shard is not valid (see `shards.state`) goes to `missing`; the gate decides whether the rest is enough.

    Args:
        workspace: its recipe names the gate's thresholds.
        partitions: keys, patterns and ranges (see `select_files`); none: those of the recipe.

    Raises:
        UserError: a partition that the source does not have, or not one valid shard.
        StorageError: the store cannot be read or written.
    """
    recipe, derived, name = workspace.recipe, workspace.derived, fingerprint(workspace.recipe)
    sources = select_files(list_sources(workspace.source), partitions or recipe.training_set.files)
    downloads = recipe.storage.downloads
    states = sorted(shard_states(derived, name, sources, downloads), key=lambda state: state.source.partition)
    with ThreadPoolExecutor(downloads) as pool:
        found = list(pool.map(lambda state: _with_statistics(derived, state), states))
    whole = [one for one in found if isinstance(one, ShardWithStatistics)]
    missing = {state.source.partition: one for state, one in zip(states, found, strict=True) if isinstance(one, str)}
    if not whole:
        problems = Counter(str(state.problem or ShardProblem.DAMAGED) for state in states)
        why = "; ".join(f"{files} are {problem}" for problem, files in problems.most_common())
        raise UserError(
            f"no training set: of {len(sources)} files below {workspace.source.uri('')} none has a valid shard with "
            f"fingerprint {name} ({why}); tokenize them first"
        )
    from dflash_core.statistics.merge import merge_statistics  # polars; whoever only loads a set need not import it

    files = [one.statistics for one in whole]
    merged = merge_statistics(files)
    body = merged.model_dump_json(indent=1).encode()
    frozen = _assemble(workspace, name, whole, missing, merged)
    # The name is a hash of the content, the statistics' own hash in it; where they are stored follows from the name.
    statistics = StoredObject(key="", size=len(body), sha256=hashlib.sha256(body).hexdigest())
    frozen = frozen.model_copy(update={"statistics": statistics})
    name = training_set_hash(frozen)
    placed = statistics.model_copy(update={"key": TrainingSetKeys(name).statistics})
    frozen = frozen.model_copy(update={"hash": name, "statistics": placed})
    _store(derived, frozen, merged, files, body)
    return frozen


def load_training_set(derived: Store, hash: str | None = None) -> TrainingSet:
    """A frozen training set, by hash or the one frozen last.

    Raises:
        UserError: there is none (of that hash).
        ObjectCorrupt: it is not what its hash says.
    """
    try:
        name = hash or derived.get_record(LATEST_TRAINING_SET, TrainingSetPointer).hash
        frozen = derived.get_record(TrainingSetKeys(name).manifest, TrainingSet)
    except ObjectMissing:
        what = f"no training set {hash}" if hash else "no training set yet"
        raise UserError(f"{derived.uri(TRAINING_SETS)} holds {what}; freeze one first") from None
    if name != frozen.hash or name != training_set_hash(frozen):
        raise ObjectCorrupt(
            f"{derived.uri(TrainingSetKeys(name).manifest)} is not what its hash says (content hashes to "
            f"{training_set_hash(frozen)}): it was edited or damaged; freeze it again"
        )
    return frozen


def load_statistics(derived: Store, training_set: TrainingSet) -> MergedStatistics:
    """The merged statistics of a training set.

    Raises:
        ObjectCorrupt: not the bytes the set names.
    """
    return MergedStatistics.model_validate_json(derived.read(training_set.statistics))


def require_gate(training_set: TrainingSet, accept_failed: bool) -> Literal["passed", "accepted although failed"]:
    """Let training start, or not; the answer goes into the checkpoint's manifest.

    Raises:
        GateError: the gate failed and nobody accepts that.
    """
    if training_set.verdict.passed:
        return "passed"
    if accept_failed:
        return "accepted although failed"
    raise GateError(
        f"the gate of training set {training_set.hash} failed: {' | '.join(training_set.verdict.reasons)}; repair "
        "these files and freeze again, or train all the same with --accept-failed-gate"
    )


def training_set_hash(training_set: TrainingSet) -> str:
    """16 hex digits of sha256 over canonical JSON of the content.

    Left out: the hash itself, the statistics' key (which has it), what a store calls the objects, and fields that are
    not set, so that sets frozen before those fields existed keep their names.
    """
    content = training_set.model_dump(
        mode="json",
        exclude={"hash": True, "statistics": {"key", "etag"}, "shards": {"__all__": {"shard": {"etag"}}}},
        exclude_none=True,
    )
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()[:16]


def _with_statistics(derived: Store, state: ShardState) -> ShardWithStatistics | str:
    """A whole shard with its statistics, or why there is none."""
    if state.manifest is None or state.problem not in (None, ShardProblem.WITHOUT_ROW):
        return state.reason
    try:
        return ShardWithStatistics(state.manifest, read_statistics(derived, state.manifest))
    except (ObjectMissing, ObjectCorrupt):
        return f"{ShardProblem.DAMAGED} (its statistics cannot be read)"


def _assemble(
    workspace: Workspace,
    fingerprint: str,
    whole: Sequence[ShardWithStatistics],
    missing: dict[str, str],
    merged: MergedStatistics,
) -> TrainingSet:
    """The set without its name and the place of its statistics."""
    expected = len(whole) + len(missing)
    filled = [one.manifest for one in whole if one.manifest.rows_kept]
    hollow = [one.manifest.source.partition for one in whole if not one.manifest.rows_kept]
    verdict = judge(
        workspace.recipe.gate,
        merged,
        [one.statistics for one in whole],
        expected,
        [f"{partition} ({why})" for partition, why in missing.items()],
    )
    return TrainingSet(
        hash="",
        recipe=workspace.recipe.name,
        fingerprint=fingerprint,
        shards=tuple(
            TrainingSetShard(
                partition=manifest.source.partition,
                source_uri=manifest.source.uri,
                source_etag=manifest.source.etag,
                source_sha256=manifest.source_sha256,
                shard=manifest.shard,
                rows=manifest.rows_kept,
                tokens=manifest.tokens,
                supervised_tokens=manifest.supervised_tokens,
            )
            for manifest in filled
        ),
        missing=tuple(sorted([*missing, *hollow])),
        coverage=len(filled) / expected,
        rows_read=merged.rows_read,
        rows_kept=merged.rows_kept,
        rows_dropped=merged.rows_dropped,
        rows_rejected=merged.rows_rejected,
        drop_reasons=add_counts([merged.dropped]),
        reject_reasons=add_counts([merged.rejected]),
        tokens=merged.tokens,
        supervised_tokens=merged.supervised_tokens,
        statistics=NOTHING_STORED,
        verdict=verdict,
    )


def _store(
    derived: Store, frozen: TrainingSet, merged: MergedStatistics, files: Sequence[FileStatistics], statistics: bytes
) -> None:
    """Statistics, report and picture first, then the manifest that names them, then the pointer to it."""
    from dflash_core.reports.plots import training_set_picture  # matplotlib, likewise

    keys, picture = TrainingSetKeys(frozen.hash), training_set_picture(merged, files)
    worst = {file.partition: file_picture(file) for file in worst_files(files)[:FILES_PICTURED]}
    report = training_set_page(frozen, merged, files, picture, worst)
    derived.put(keys.statistics, statistics, "application/json")
    derived.put(keys.report, report.encode(), "text/html; charset=utf-8")
    derived.put(keys.picture, picture, "image/png")
    derived.put_record(keys.manifest, frozen)
    derived.put_record(LATEST_TRAINING_SET, TrainingSetPointer(hash=frozen.hash))
