"""Whether a training set is still of the files in the bucket, by their ETags."""

from collections.abc import Sequence

from dflash_core.records import Record, SourceFile, TrainingSet


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
