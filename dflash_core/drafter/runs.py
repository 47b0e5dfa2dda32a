"""Finished training runs: where their manifests lie, and how they are found; without torch."""

from dflash_core.errors import ObjectMissing
from dflash_core.records import DrafterCheckpoint, RunPointer
from dflash_core.storage.store import Store

LATEST = "drafter_checkpoint/latest.json"
"""Names the run that was finished last."""


def checkpoint_key(run: str) -> str:
    """Where the manifest of a finished run lies."""
    return f"drafter_checkpoint/{run}/manifest.json"


def settings_key(run: str) -> str:
    """Where the recipe of a finished run lies."""
    return f"drafter_checkpoint/{run}/recipe.json"


def find_checkpoint(store: Store, run: str | None) -> DrafterCheckpoint:
    """The manifest of a finished run.

    Args:
        store: the derived one.
        run: its name; None: the run that was finished last.

    Raises:
        ObjectMissing: no such run has finished.
    """
    try:
        name = run or store.get_record(LATEST, RunPointer).run
        return store.get_record(checkpoint_key(name), DrafterCheckpoint)
    except ObjectMissing:
        what = f"run {run!r}" if run else "run"
        raise ObjectMissing(
            f"{store.uri('drafter_checkpoint/')} holds no finished {what}; train a drafter first (dflash train)"
        ) from None
