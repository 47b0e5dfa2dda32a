"""Who a run is: its name, a hash of everything that changes its weights, and what its checkpoints are made from.

The trade-off: an unchanged recipe redoes nothing and a changed one never continues an older run by accident; in
exchange renaming a file of the target's folder is another target.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dflash_core import TRAINING_VERSION
from dflash_core.drafter.folder import CONFIG_FILE, read_config
from dflash_core.drafter.runs import checkpoint_key
from dflash_core.errors import IncompatibleError, ObjectMissing
from dflash_core.recipe import Recipe
from dflash_core.records import DrafterCheckpoint, TrainingSet
from dflash_core.storage.store import Store
from dflash_core.storage.transfers import sha256_file
from dflash_core.training.checkpoint import STATE, CheckpointFolder
from dflash_core.training.placement import RankPlacement
from dflash_core.training.recorder import RemoteCheckpoints

NOT_IN_NAME = {
    "placement",
    "batch_rows",
    "accumulation",
    "vocabulary_chunk_rows",
    "gradient_checkpointing",
    "validate_every_steps",
    "validation_rows",
    "acceptance_every_steps",
    "acceptance_prompts",
    "trackers",
    "checkpoint_every_steps",
    "keep_checkpoints",
    "skips_before_stop",
    "max_bad_row_share",
}
"""Settings that change how a step is computed or watched, not what it computes; rows a step enter as a product."""


def run_name(recipe: Recipe, training_set: TrainingSet, target_fingerprint: str) -> str:
    """`<recipe name>-<12 hex>`: a hash of everything that changes the weights.

    Raises:
        IncompatibleError: the drafter to start from cannot be read.
    """
    warm_start = recipe.drafter.warm_start
    parts = {
        "code_version": TRAINING_VERSION,
        "seed": recipe.seed,
        "training_set": training_set.hash,
        "target": target_fingerprint,
        "target_layers": [recipe.target.layer_ids, recipe.target.layers, recipe.target.dtype],
        "drafter": recipe.drafter.model_dump(mode="json", exclude={"warm_start"}),
        "warm_start": None if warm_start is None else _folder_sha256(warm_start),
        "training": recipe.training.model_dump(mode="json", exclude=NOT_IN_NAME),
        "step_rows": recipe.training.batch_rows
        * recipe.training.accumulation
        * len(recipe.training.placement.drafters),
        "gamma": recipe.gamma,
    }
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
    return f"{recipe.name}-{digest[:12]}"


def identity(
    recipe: Recipe, training_set: TrainingSet, target_fingerprint: str, placement: RankPlacement
) -> dict[str, str]:
    """What a checkpoint is made from, field by field; a resume with any other is refused."""
    warm_start = recipe.drafter.warm_start
    sections: dict[str, Mapping[str, Any]] = {
        "target": {key: getattr(recipe.target, key) for key in ("layer_ids", "layers", "dtype")},
        "drafter": recipe.drafter.model_dump(mode="json", exclude={"warm_start"}),
        "training": recipe.training.model_dump(mode="json", exclude=NOT_IN_NAME - {"batch_rows", "accumulation"}),
    }
    return {
        "code_version": TRAINING_VERSION,
        "training_set": training_set.hash,
        "target and tokenizer": target_fingerprint,
        "seed": str(recipe.seed),
        "drafters (ranks)": str(placement.ranks),
        "drafter.warm_start": "none" if warm_start is None else _folder_sha256(warm_start),
        **{f"{name}.{key}": json.dumps(value) for name, table in sections.items() for key, value in table.items()},
    }


def refuse_changed_recipe(recipe: Recipe, store: Store, run: str, ours: Mapping[str, str]) -> None:
    """Refuse to start beside an unfinished run of this recipe and training set that other settings began.

    A recipe that was edited, a target that was replaced or another number of ranks would else start at step 0 in
    silence, and the days that the other run took would be forgotten.

    Raises:
        IncompatibleError: naming run, step, and each field that differs with both values.
    """
    folders = recipe.storage.work_dir / "drafter_checkpoint"
    for other, step, theirs in (*_on_disk(folders, recipe.name), *_in_store(store, recipe.name)):
        if other == run or theirs.get("training_set") != ours["training_set"]:
            continue
        if store.find_record(checkpoint_key(other), DrafterCheckpoint) is not None:
            continue
        differing = [key for key in sorted({*ours, *theirs}) if ours.get(key) != theirs.get(key)]
        fields = ", ".join(f"{key} = {theirs.get(key)} (now {ours.get(key)})" for key in differing)
        raise IncompatibleError(
            f"run {other} of recipe {recipe.name!r} stopped at step {step} and was made with {fields}; restore that to "
            f"continue it, or give the recipe another name to start anew (or delete {folders / other} and "
            f"{store.uri(f'drafter_checkpoint/{other}/')})"
        )


Found = tuple[str, int, dict[str, str]]
"""(run, step, identity)"""


def _on_disk(folders: Path, name: str) -> Iterator[Found]:
    for folder in sorted(folders.glob(f"{name}-*")):
        if _is_run_of(name, folder.name):
            checkpoints = CheckpointFolder(folder / "checkpoints")
            for entry in checkpoints.entries()[-1:]:
                try:
                    body = (checkpoints.folder(entry["step"]) / STATE).read_text(encoding="utf8")
                    yield folder.name, entry["step"], dict(json.loads(body)["identity"])
                except (OSError, ValueError, KeyError):
                    continue  # damaged: nothing that could be continued


def _in_store(store: Store, name: str) -> Iterator[Found]:
    listed = {key.split("/")[1] for key, _, _ in store.list(f"drafter_checkpoint/{name}-")}
    for run in sorted(other for other in listed if _is_run_of(name, other)):
        for saved in RemoteCheckpoints(store, run).saved()[-1:]:
            for stored in (file for file in saved.files if file.key.endswith(f"/{STATE}")):
                try:
                    yield run, saved.step, dict(json.loads(store.read(stored))["identity"])
                except (ObjectMissing, ValueError, KeyError):
                    continue


def _is_run_of(name: str, run: str) -> bool:
    return re.fullmatch(re.escape(name) + "-[0-9a-f]{12}", run) is not None


def _folder_sha256(folder: Path) -> str:
    read_config(folder)
    files = [folder / CONFIG_FILE, *sorted(folder.glob("*.safetensors"))]
    return hashlib.sha256("".join(sha256_file(file) for file in files).encode()).hexdigest()
