"""Who a run is: its name, a hash of everything that changes its weights, and what its checkpoints are made from.

The trade-off: an unchanged recipe redoes nothing and a changed one never continues an older run by accident; in
exchange renaming a file of the target's folder is another target.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from dflash_core import TRAINING_VERSION
from dflash_core.drafter.folder import read_config
from dflash_core.errors import IncompatibleError, ObjectMissing
from dflash_core.local_files import sha256_file
from dflash_core.recipe import Recipe, settings_hash
from dflash_core.records import DrafterCheckpoint, TrainingSet
from dflash_core.storage.layout import CONFIG_FILE, RUNS, RunKeys
from dflash_core.storage.s3 import Store
from dflash_core.training.checkpoint import STATE_FILE, UNSET, CheckpointFolder, StoredCheckpoints, state_file
from dflash_core.training.placement import RankPlacement
from dflash_core.workspace import Workspace

LOCAL_RUNS = "drafter_checkpoint"
"""Folder of storage.work_dir with one folder for each run."""
CHECKPOINTS = "checkpoints"
"""Of a run's folder: the local ones."""


def run_name(recipe: Recipe, training_set: TrainingSet, target_fingerprint: str) -> str:
    """`<recipe name>-<12 hex>`: a hash of everything that changes the weights.

    Raises:
        IncompatibleError: the drafter to start from cannot be read.
    """
    digest = settings_hash(
        recipe.settings_for("weights"),
        {
            "code_version": TRAINING_VERSION,
            "training_set": training_set.hash,
            "target": target_fingerprint,
            "warm_start": _warm_start(recipe),
        },
    )
    return f"{recipe.name}-{digest[:12]}"


def identity(
    recipe: Recipe, training_set: TrainingSet, target_fingerprint: str, placement: RankPlacement
) -> dict[str, str]:
    """What a checkpoint is made from, field by field; a resume with any other is refused.

    Besides what changes the weights it holds how a step is shared out: sums in another order round differently.
    """
    settings = recipe.settings_for("weights") | {
        "training.batch_rows": recipe.training.batch_rows,
        "training.accumulation": recipe.training.accumulation,
    }
    return {
        "code_version": TRAINING_VERSION,
        "training_set": training_set.hash,
        "target and tokenizer": target_fingerprint,
        "drafters (ranks)": str(placement.ranks),
        "drafter.warm_start": _warm_start(recipe),
        **{name: json.dumps(value) for name, value in settings.items()},
    }


def refuse_changed_recipe(workspace: Workspace, run: str, ours: Mapping[str, str]) -> None:
    """Refuse to start next to an unfinished run of this recipe and training set that other settings began.

    A recipe that was edited, a target that was replaced or another number of ranks would otherwise start at step 0
    without a word, and the days that the other run took would be forgotten.

    Raises:
        IncompatibleError: naming run, step, and each field that differs with both values.
    """
    name, store, folders = workspace.recipe.name, workspace.derived, workspace.work_dir / LOCAL_RUNS
    for other, step, theirs in (*_on_disk(folders, name), *_in_store(store, name)):
        if other == run or theirs.get("training_set") != ours["training_set"]:
            continue
        if store.find_record(RunKeys(other).manifest, DrafterCheckpoint) is not None:
            continue
        differing = [key for key in sorted({*ours, *theirs}) if ours.get(key) != theirs.get(key)]
        fields = ", ".join(f"{key} = {theirs.get(key, UNSET)} (now {ours.get(key, UNSET)})" for key in differing)
        raise IncompatibleError(
            f"run {other} of recipe {name!r} stopped at step {step} and was made with {fields}; restore that to "
            f"continue it, or give the recipe another name to start from the beginning (or delete {folders / other} "
            f"and {store.uri(RunKeys(other).folder)})"
        )


Found = tuple[str, int, dict[str, str]]
"""(run, step, identity)"""


def _on_disk(folders: Path, name: str) -> Iterator[Found]:
    for folder in sorted(folders.glob(f"{name}-*")):
        if _is_run_of(name, folder.name):
            checkpoints = CheckpointFolder(folder / CHECKPOINTS)
            for entry in checkpoints.entries()[-1:]:
                try:
                    body = (checkpoints.folder(entry["step"]) / STATE_FILE).read_text(encoding="utf8")
                    yield folder.name, entry["step"], dict(json.loads(body)["identity"])
                except (OSError, ValueError, KeyError):
                    continue  # damaged: nothing that could be continued


def _in_store(store: Store, name: str) -> Iterator[Found]:
    listed = {found.key.removeprefix(RUNS).split("/")[0] for found in store.list(f"{RUNS}{name}-")}
    for run in sorted(other for other in listed if _is_run_of(name, other)):
        for saved in StoredCheckpoints(store, RunKeys(run)).saved()[-1:]:
            try:
                yield run, saved.step, dict(json.loads(store.read(state_file(saved)))["identity"])
            except (ObjectMissing, ValueError, KeyError):
                continue


def _is_run_of(name: str, run: str) -> bool:
    return re.fullmatch(re.escape(name) + "-[0-9a-f]{12}", run) is not None


def _warm_start(recipe: Recipe) -> str:
    """sha256 over the drafter to start from, or "none"."""
    folder = recipe.drafter.warm_start
    if folder is None:
        return "none"
    read_config(folder)
    files = [folder / CONFIG_FILE, *sorted(folder.glob("*.safetensors"))]
    return hashlib.sha256("".join(sha256_file(file) for file in files).encode()).hexdigest()
