"""The objects that one source file becomes: their names, whether they are there, reading the source, writing them.

The manifest is written last, so whatever it names is whole; a writer that dies earlier leaves orphans that the next run
overwrites with the same bytes.
"""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dflash_core import TOKENIZATION_VERSION
from dflash_core.completions.lines import check_size
from dflash_core.errors import ObjectCorrupt, ObjectMissing, UnreadableFile
from dflash_core.quality.statistics import FileStatistics
from dflash_core.records import ShardManifest, SourceFile
from dflash_core.storage.store import Download, Stores

TOP_REASONS = 3
MAX_LISTINGS = 8
"""Files asked for one by one; for more the whole folder is listed."""


@dataclass(frozen=True)
class TokenizedFile:
    """What one file becomes, before it is stored."""

    shard: bytes
    rejects: bytes
    """JSON lines: line, reason, detail."""
    statistics: FileStatistics
    reject_reasons: dict[str, int]


@dataclass(frozen=True)
class FileDone:
    """One source file that is tokenized and stored."""

    source: SourceFile
    manifest: ShardManifest
    statistics: FileStatistics
    skipped: bool
    """It was done already: same source, same fingerprint, objects in place."""
    seconds: float


@dataclass(frozen=True)
class Names:
    """Keys of one file's objects, below the derived prefix."""

    fingerprint: str
    partition: str

    @property
    def shard(self) -> str:
        """The Arrow file."""
        return f"tokenized_shards/{self.fingerprint}/{self.partition}.arrow"

    @property
    def rejects(self) -> str:
        """JSON lines."""
        return f"tokenized_shards/{self.fingerprint}/{self.partition}.rejects.jsonl"

    @property
    def statistics(self) -> str:
        """A `FileStatistics`."""
        return f"loss_mask_stats/{self.fingerprint}/{self.partition}.json"

    @property
    def manifest(self) -> str:
        """A `ShardManifest`."""
        return f"tokenized_shards/{self.fingerprint}/{self.partition}.json"


def list_done(stores: Stores, fingerprint: str, partitions: Sequence[str]) -> dict[str, int]:
    """Sizes of the objects that exist for these partitions, by key: one listing instead of a request an object.

    Raises:
        StorageError: the store cannot be asked.
    """
    below = [Names(fingerprint, partition).manifest.removesuffix("json") for partition in partitions]
    prefixes = below if len(below) <= MAX_LISTINGS else [Names(fingerprint, "").manifest.removesuffix(".json")]
    return {key: size for prefix in prefixes for key, size, _ in stores.derived.list(prefix)}


def find_done(stores: Stores, names: Names, source: SourceFile, there: Mapping[str, int]) -> FileDone | None:
    """The file's result from an earlier run, if it is of this source and all it names is there as it was written.

    Raises:
        StorageError: the store cannot be asked.
    """
    began = time.monotonic()
    manifest = stores.derived.find_record(names.manifest, ShardManifest)
    if manifest is None or manifest.source != source or manifest.fingerprint != names.fingerprint:
        return None
    if not manifest.rows_kept:
        return None  # it failed then and is to fail again, with its reasons
    for stored in (manifest.shard, manifest.rejects):
        if there.get(stored.key) != stored.size or (stored.size and not stores.derived.holds(stored)):
            return None
    try:
        statistics = FileStatistics.model_validate_json(stores.derived.read(manifest.statistics))
    except (ObjectMissing, ObjectCorrupt, ValueError):
        return None
    return FileDone(source, manifest, statistics, skipped=True, seconds=time.monotonic() - began)


def read_source(stores: Stores, source: SourceFile) -> Download:
    """The file's bytes, exactly the version that was listed.

    Raises:
        UnreadableFile: it is larger than one file may be.
        ObjectChanged: it was replaced since.
        StorageError: it cannot be read.
    """
    check_size(source.uri, source.size)
    return stores.source.get(source.key.removeprefix(stores.source.prefix), etag=source.etag)


def store_file(stores: Stores, names: Names, source: SourceFile, sha256: str, done: TokenizedFile) -> ShardManifest:
    """Write the objects, the manifest last.

    Also those of a file of which no row survives: its statistics count in the gate, so that a wholly bad file cannot
    pass where a mostly bad one fails.

    Raises:
        UnreadableFile: no row survives; the sentence holds the top reasons.
        StorageError: the store refuses.
    """
    derived, statistics = stores.derived, done.statistics
    shard = derived.put(names.shard, done.shard, "application/vnd.apache.arrow.file")
    rejects = derived.put(names.rejects, done.rejects, "application/jsonl")
    stored = derived.put_record(names.statistics, statistics)
    manifest = ShardManifest(
        fingerprint=names.fingerprint,
        code_version=TOKENIZATION_VERSION,
        source=source,
        source_sha256=sha256,
        shard=shard,
        statistics=stored,
        rejects=rejects,
        rows_read=statistics.rows_read,
        rows_kept=statistics.rows_kept,
        rows_rejected=sum(done.reject_reasons.values()),
        reject_reasons=done.reject_reasons,
        tokens=statistics.tokens,
        supervised_tokens=statistics.supervised_tokens,
    )
    derived.put_record(names.manifest, manifest)
    if not statistics.rows_kept:
        raise UnreadableFile(_nothing_kept(source, statistics.rows_read, Counter(done.reject_reasons)))
    return manifest


def _nothing_kept(source: SourceFile, rows_read: int, reasons: Counter[str]) -> str:
    if not rows_read:
        return f"{source.uri} is empty; remove it or write completions into it"
    top = "; ".join(f"{reason} ({count})" for reason, count in reasons.most_common(TOP_REASONS))
    return f"{source.uri}: none of {rows_read} rows survives: {top}; correct the file or the recipe"
