"""Finished training runs, by their manifests alone; without torch."""

from dflash_core.errors import ObjectMissing
from dflash_core.records import DrafterCheckpoint, RunPointer
from dflash_core.storage.store import Store


def find_checkpoint(store: Store, run: str | None) -> DrafterCheckpoint:
    """The manifest of a finished run.

    Args:
        store: the derived one.
        run: its name; None: the run that was finished last.

    Raises:
        ObjectMissing: no such run has finished.
    """
    try:
        name = run or store.get_record("drafter_checkpoint/latest.json", RunPointer).run
        return store.get_record(f"drafter_checkpoint/{name}/manifest.json", DrafterCheckpoint)
    except ObjectMissing:
        what = f"run {run!r}" if run else "run"
        raise ObjectMissing(
            f"{store.uri('drafter_checkpoint/')} holds no finished {what}; train a drafter first (dflash train)"
        ) from None
