"""Finished training runs and how they are found; without torch."""

from dflash_core.errors import ObjectMissing
from dflash_core.records import DrafterCheckpoint, RunPointer
from dflash_core.storage.layout import LATEST_RUN, RUNS, RunKeys
from dflash_core.storage.s3 import Store


def find_checkpoint(store: Store, run: str | None) -> DrafterCheckpoint:
    """The manifest of a finished run.

    Args:
        store: the derived one.
        run: its name; None: the run that was finished last.

    Raises:
        ObjectMissing: no such run has finished.
    """
    try:
        name = run or store.get_record(LATEST_RUN, RunPointer).run
        return store.get_record(RunKeys(name).manifest, DrafterCheckpoint)
    except ObjectMissing:
        what = f"run {run!r}" if run else "run"
        raise ObjectMissing(
            f"{store.uri(RUNS)} holds no finished {what}; train a drafter first (dflash train)"
        ) from None
