"""THE rule: is this file's shard valid, and if not, why? Everyone who asks, asks here.

A shard is valid if its manifest can be read, is of this fingerprint and of this very version of the source file, and
every object that it names is there as it was written. One listing shows the latter for all files: size and ETag of each
object, which the manifest remembers from when it was written. Where the ETag cannot tell (objects copied between
stores), the object itself is asked for the sha256 in its metadata.
"""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from enum import StrEnum

from dflash_core.errors import ObjectCorrupt, ObjectMissing
from dflash_core.records import ShardManifest, SourceFile, StoredObject
from dflash_core.statistics.statistics import FileStatistics
from dflash_core.storage.layout import ShardKeys, shards_folder, statistics_folder
from dflash_core.storage.s3 import ListedObject, Store

MAX_LISTINGS = 8
"""Files asked for one by one; for more the whole folders are listed."""


class ShardProblem(StrEnum):
    """What is wrong with a file's shard."""

    NOT_TOKENIZED = "not tokenized"
    OLDER = "older than the source file"
    DAMAGED = "damaged"
    WITHOUT_ROW = "without a row"
    """Whole and of this source, but no row survived: it counts in the gate and cannot be trained on."""


@dataclass(frozen=True)
class ShardState:
    """A source file and its shard under one fingerprint."""

    source: SourceFile
    manifest: ShardManifest | None
    """None: there is none that can be read."""
    problem: ShardProblem | None
    """None: the shard is valid."""
    detail: str = ""

    @property
    def reason(self) -> str:
        """The problem in words; empty: there is none."""
        return f"{self.problem or ''}{f' ({self.detail})' if self.detail else ''}"


def shard_states(
    derived: Store, fingerprint: str, sources: Sequence[SourceFile], downloads: int
) -> Iterator[ShardState]:
    """The state of each file's shard, in any order, each as soon as it is known.

    Args:
        derived: the store.
        fingerprint: of the tokenization.
        sources: as they are listed now.
        downloads: requests in flight.

    Raises:
        StorageError: the store cannot be asked.
    """
    # Two listings instead of a request an object; for a few files only what is theirs.
    prefixes = [shards_folder(fingerprint), statistics_folder(fingerprint)]
    if len(sources) <= MAX_LISTINGS:
        prefixes = [f"{folder}{source.partition}." for folder in prefixes for source in sources]
    there = {listed.key: listed for prefix in prefixes for listed in derived.list(prefix)}
    candidates: list[SourceFile] = []
    for source in sources:
        if ShardKeys(fingerprint, source.partition).manifest in there:
            candidates.append(source)
        else:
            yield ShardState(source, None, ShardProblem.NOT_TOKENIZED)
    if candidates:
        with ThreadPoolExecutor(min(len(candidates), downloads)) as pool:
            asked = [pool.submit(_state, derived, fingerprint, source, there) for source in candidates]
            for future in as_completed(asked):
                yield future.result()


def invalid_shards(
    derived: Store, fingerprint: str, sources: Sequence[SourceFile], downloads: int
) -> dict[str, ShardState]:
    """Partition -> state of the files that have no valid shard, sorted; see `shard_states`."""
    found = {state.source.partition: state for state in shard_states(derived, fingerprint, sources, downloads)}
    return {partition: state for partition, state in sorted(found.items()) if state.problem is not None}


def read_statistics(derived: Store, manifest: ShardManifest) -> FileStatistics:
    """The statistics that a manifest names.

    Raises:
        ObjectMissing: they are gone.
        ObjectCorrupt: they are not what the manifest says.
    """
    try:
        return FileStatistics.model_validate_json(derived.read(manifest.statistics))
    except ValueError as error:
        raise ObjectCorrupt(f"{derived.uri(manifest.statistics.key)} cannot be read: {error}") from None


def _state(derived: Store, fingerprint: str, source: SourceFile, there: Mapping[str, ListedObject]) -> ShardState:
    key = ShardKeys(fingerprint, source.partition).manifest
    try:
        manifest = derived.get_record(key, ShardManifest)
    except ObjectMissing:
        return ShardState(source, None, ShardProblem.NOT_TOKENIZED)
    except ObjectCorrupt:
        return ShardState(source, None, ShardProblem.DAMAGED, f"{key} cannot be read")
    if (manifest.fingerprint, manifest.source.partition) != (fingerprint, source.partition):
        return ShardState(source, None, ShardProblem.DAMAGED, f"{key} is another file's")
    if manifest.source != source:
        return ShardState(source, manifest, ShardProblem.OLDER)
    for stored in (manifest.shard, manifest.rejects, manifest.statistics):
        what = _difference(derived, stored, there.get(stored.key))
        if what:
            return ShardState(source, manifest, ShardProblem.DAMAGED, f"{stored.key} {what}")
    return ShardState(source, manifest, None if manifest.rows_kept else ShardProblem.WITHOUT_ROW)


def _difference(derived: Store, stored: StoredObject, listed: ListedObject | None) -> str:
    """How an object differs from what was written; empty: it does not."""
    if listed is None:
        return "is missing"
    if listed.size != stored.size:
        return f"has {listed.size} bytes, not {stored.size}"
    if listed.etag == stored.etag or derived.holds(stored):
        return ""
    return "has other bytes"
