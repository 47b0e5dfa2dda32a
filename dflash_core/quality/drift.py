"""Whether what was made from the source files is still of those files: by their ETags, reading manifests only."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from dflash_core.quality.training_set import manifest_key
from dflash_core.recipe import Recipe
from dflash_core.records import Record, ShardManifest, SourceFile, TrainingSet
from dflash_core.storage.store import open_stores

NOT_TOKENIZED, OLDER, WITHOUT_ROW = "not tokenized", "older than the source file", "without a row"


class Drift(Record):
    """How the bucket differs from what a training set was frozen from; each a sorted list of partitions."""

    changed: tuple[str, ...]
    vanished: tuple[str, ...]
    new: tuple[str, ...]

    @property
    def stale(self) -> bool:
        """Whether a file that is in the training set is not what it was; new files alone make nothing wrong."""
        return bool(self.changed or self.vanished)

    def __str__(self) -> str:
        counts = ((self.changed, "changed"), (self.vanished, "vanished"), (self.new, "new"))
        found = [f"{len(files)} {what} ({', '.join(files[:5])})" for files, what in counts if files]
        return ", ".join(found) or "no file changed, vanished or new"


def drift_of(frozen: TrainingSet, sources: Sequence[SourceFile]) -> Drift:
    """Compare a training set with the bucket as it is listed now."""
    then = {shard.partition: shard.source_etag for shard in frozen.shards}
    now = {source.partition: source.etag for source in sources}
    return Drift(
        changed=tuple(sorted(p for p, etag in then.items() if now.get(p, etag) != etag)),
        vanished=tuple(sorted(then.keys() - now.keys())),
        new=tuple(sorted(now.keys() - then.keys() - set(frozen.missing))),
    )


def without_shard(recipe: Recipe, fingerprint: str, sources: Sequence[SourceFile]) -> dict[str, str]:
    """Partitions whose files have no shard of their present bytes under this fingerprint, and why.

    Raises:
        StorageError: the store cannot be read.
    """
    derived = open_stores(recipe).derived
    names = {key for key, _, _ in derived.list(manifest_key(fingerprint, "").removesuffix(".json"))}

    def look(source: SourceFile) -> str | None:
        key = manifest_key(fingerprint, source.partition)
        if key not in names:
            return NOT_TOKENIZED
        manifest = derived.find_record(key, ShardManifest)
        if manifest is None:
            return "damaged"
        if manifest.source.etag != source.etag:
            return OLDER
        return None if manifest.rows_kept else WITHOUT_ROW

    with ThreadPoolExecutor(recipe.storage.downloads) as pool:
        found = pool.map(look, sources)
        return {source.partition: why for source, why in zip(sources, found, strict=True) if why is not None}
