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
from dflash_core.quality.gate import judge
from dflash_core.quality.plots import merged_plot
from dflash_core.quality.report import training_set_report
from dflash_core.quality.statistics import FileStatistics, MergedStatistics, merge_statistics
from dflash_core.recipe import Recipe
from dflash_core.records import (
    ShardManifest,
    SourceFile,
    StoredObject,
    TrainingSet,
    TrainingSetPointer,
    TrainingSetShard,
)
from dflash_core.storage.selection import select_files
from dflash_core.storage.store import Store, list_sources, open_stores

LATEST = "training_set/latest.json"


@dataclass(frozen=True)
class ValidShard:
    """A shard that belongs to the source file as it is now, and its statistics."""

    manifest: ShardManifest
    statistics: FileStatistics


def freeze_training_set(recipe: Recipe, fingerprint: str, partitions: Sequence[str] | None = None) -> TrainingSet:
    """Freeze all valid shards of the source, or of the given partitions, and store set, statistics and report.

    A file without a shard, or whose shard was made from other bytes, under another fingerprint, or is not whole, goes
    to `missing`; the gate decides whether the rest is enough.

    Args:
        recipe: names the stores and the gate's thresholds.
        fingerprint: of the tokenization (`tokenization` computes it from the recipe).
        partitions: keys, patterns and ranges (see `select_files`); none: those of the recipe.

    Raises:
        UserError: a partition that the source does not have, or not one valid shard.
        StorageError: the store cannot be read or written.
    """
    stores = open_stores(recipe)
    sources = select_files(list_sources(stores.source), partitions or recipe.training_set.files)
    with ThreadPoolExecutor(recipe.storage.downloads) as pool:
        found = list(pool.map(lambda source: find_shard(stores.derived, fingerprint, source), sources))
    valid = [one for one in found if isinstance(one, ValidShard)]
    missing = {source.partition: one for source, one in zip(sources, found, strict=True) if isinstance(one, str)}
    if not valid:
        why = "; ".join(f"{rows} are {reason}" for reason, rows in Counter(missing.values()).most_common())
        raise UserError(
            f"no training set: of {len(sources)} files below {stores.source.uri('')} none has a valid shard with "
            f"fingerprint {fingerprint} ({why}); tokenize them first"
        )
    files = [one.statistics for one in valid]
    merged = merge_statistics(files)
    body = merged.model_dump_json(indent=1).encode()
    frozen = _assemble(recipe, fingerprint, valid, missing, merged)
    frozen = _named(frozen, StoredObject(key="", size=len(body), sha256=hashlib.sha256(body).hexdigest()))
    picture = merged_plot(merged, files)
    _store(stores.derived, frozen, body, training_set_report(frozen, merged, files, picture), picture)
    return frozen


def find_shard(derived: Store, fingerprint: str, source: SourceFile) -> ValidShard | str:
    """The shard of this very source file, or what is wrong with it ("not tokenized", ...)."""
    try:
        manifest = derived.get_record(manifest_key(fingerprint, source.partition), ShardManifest)
        if (manifest.fingerprint, manifest.source.partition) != (fingerprint, source.partition):
            return "of another fingerprint or file"
        if manifest.source.etag != source.etag:
            return "older than the source file"
        if not derived.holds(manifest.shard):
            return "damaged"
        statistics = FileStatistics.model_validate_json(derived.read(manifest.statistics))
    except ObjectMissing:
        return "not tokenized"
    except (ObjectCorrupt, ValueError):
        return "damaged"
    return ValidShard(manifest, statistics)


def load_training_set(recipe: Recipe, hash: str | None = None) -> TrainingSet:
    """A frozen training set, by hash or the one frozen last.

    Raises:
        UserError: there is none (of that hash).
        ObjectCorrupt: it is not what its hash says.
    """
    derived = open_stores(recipe).derived
    try:
        name = hash or derived.get_record(LATEST, TrainingSetPointer).hash
        frozen = derived.get_record(f"training_set/{name}.json", TrainingSet)
    except ObjectMissing:
        what = f"no training set {hash}" if hash else "no training set yet"
        raise UserError(f"{derived.uri('training_set/')} holds {what}; freeze one first") from None
    if name != frozen.hash or name != training_set_hash(frozen):
        raise ObjectCorrupt(
            f"{derived.uri(f'training_set/{name}.json')} is not what its hash says (content hashes to "
            f"{training_set_hash(frozen)}): it was edited or damaged; freeze it again"
        )
    return frozen


def load_statistics(recipe: Recipe, training_set: TrainingSet) -> MergedStatistics:
    """The merged statistics of a training set.

    Raises:
        ObjectCorrupt: not the bytes the set names.
    """
    return MergedStatistics.model_validate_json(open_stores(recipe).derived.read(training_set.statistics))


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
    """16 hex digits of sha256 over canonical JSON of all but the hash itself and the statistics' key (which has it)."""
    content = training_set.model_dump(mode="json", exclude={"hash": True, "statistics": {"key"}})
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()[:16]


def manifest_key(fingerprint: str, partition: str) -> str:
    """Where the manifest of a partition's shard lies."""
    return f"tokenized_shards/{fingerprint}/{partition}.json"


def _assemble(
    recipe: Recipe,
    fingerprint: str,
    valid: Sequence[ValidShard],
    missing: dict[str, str],
    merged: MergedStatistics,
) -> TrainingSet:
    """The set without its name and the place of its statistics."""
    expected = len(valid) + len(missing)
    manifests = [one.manifest for one in valid]
    filled = [manifest for manifest in manifests if manifest.rows_kept]
    hollow = [manifest.source.partition for manifest in manifests if not manifest.rows_kept]
    reasons: Counter[str] = Counter()
    for manifest in manifests:
        reasons.update(manifest.reject_reasons)
    verdict = judge(
        recipe.gate,
        merged,
        [one.statistics for one in valid],
        expected,
        [f"{partition} ({why})" for partition, why in missing.items()],
    )
    return TrainingSet(
        hash="",
        recipe=recipe.name,
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
        rows_read=sum(manifest.rows_read for manifest in manifests),
        rows_kept=sum(manifest.rows_kept for manifest in manifests),
        rows_rejected=sum(manifest.rows_rejected for manifest in manifests),
        reject_reasons=dict(sorted(reasons.items(), key=lambda item: (-item[1], item[0]))),
        tokens=sum(manifest.tokens for manifest in manifests),
        supervised_tokens=sum(manifest.supervised_tokens for manifest in manifests),
        statistics=StoredObject(key="", size=0, sha256=""),
        verdict=verdict,
    )


def _named(training_set: TrainingSet, statistics: StoredObject) -> TrainingSet:
    content = training_set.model_copy(update={"statistics": statistics})
    name = training_set_hash(content)
    placed = statistics.model_copy(update={"key": f"training_set/{name}.statistics.json"})
    return content.model_copy(update={"hash": name, "statistics": placed})


def _store(derived: Store, training_set: TrainingSet, statistics: bytes, report: str, picture: bytes) -> None:
    """Statistics, report and picture first, then the manifest that names them, then the pointer to it."""
    derived.put(training_set.statistics.key, statistics, "application/json")
    derived.put(report_key(training_set), report.encode(), "text/html; charset=utf-8")
    derived.put(picture_key(training_set), picture, "image/png")
    derived.put_record(f"training_set/{training_set.hash}.json", training_set)
    derived.put_record(LATEST, TrainingSetPointer(hash=training_set.hash))


def report_key(training_set: TrainingSet) -> str:
    """Where the report on a training set lies."""
    return f"training_set/{training_set.hash}.html"


def picture_key(training_set: TrainingSet) -> str:
    """Where the picture of all its files lies."""
    return f"training_set/{training_set.hash}.png"
