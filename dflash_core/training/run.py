"""A training run from recipe and training set to a finished checkpoint in the store; the same inputs, the same run.

The trade-off: the run's name is a hash of everything that changes its weights, so a changed recipe never continues an
older run by accident, and an unchanged one redoes nothing; in exchange renaming a target folder's file starts anew.
"""

import fcntl
import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import distributed

from dflash_core import TRAINING_VERSION
from dflash_core.batches.cache import open_rows
from dflash_core.drafter.config import DrafterConfig, drafter_config, read_target_config, tokenizer_mask_id
from dflash_core.drafter.folder import CONFIG_FILE, WEIGHTS_FILE, read_config, save_drafter
from dflash_core.drafter.target_files import target_fingerprint, tokenizer_sha256
from dflash_core.errors import IncompatibleError, UserError
from dflash_core.quality.training_set import load_training_set, require_gate
from dflash_core.recipe import Recipe
from dflash_core.records import DrafterCheckpoint, FileCoverage, RunPointer, TrainingSet
from dflash_core.storage.store import Store, open_stores
from dflash_core.storage.transfers import sha256_file, upload_file
from dflash_core.tokenization.fingerprint import fingerprint
from dflash_core.training.checkpoint import METRICS, CheckpointFolder, Progress, require_tensors
from dflash_core.training.failures import readable_failures
from dflash_core.training.placement import RankPlacement, join, place
from dflash_core.training.recorder import LeadRecorder, RemoteCheckpoints, resume
from dflash_core.training.setup import make_data, make_feed, make_learner, require_fitting
from dflash_core.training.step import COVERAGE_COLUMNS, Learner
from dflash_core.training.trainer import Follower, OnStep, Recorder, StopRequest, Trainer

Shared = TypeVar("Shared")

LATEST = "drafter_checkpoint/latest.json"
NOT_IN_NAME = {
    "placement",
    "batch_rows",
    "accumulation",
    "vocabulary_chunk_rows",
    "gradient_checkpointing",
    "validate_every_steps",
    "validation_rows",
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


def train_drafter(
    recipe: Recipe,
    training_set_hash: str | None,
    accept_failed_gate: bool,
    on_step: OnStep,
    stop: StopRequest | None = None,
) -> DrafterCheckpoint:
    """Train the drafter the recipe describes, or return its checkpoint if that has been done.

    Called once in each process of the run (see `launch`); continues from the newest checkpoint of this run.

    Args:
        training_set_hash: which training set; None: the one frozen last.
        accept_failed_gate: train although the gate failed; recorded in the result.
        on_step: called on the lead rank after each step.
        stop: ask it to end the run early, with a checkpoint.

    Raises:
        GateError: the gate failed and `accept_failed_gate` is not set.
        TrainingStopped: asked to stop; the same call continues.
        UserError: anything else that a person can repair; the message says what.
    """
    training_set = load_training_set(recipe, training_set_hash)
    gate = require_gate(training_set, accept_failed_gate)
    _require_same_tokenization(recipe, training_set)
    placement = place(recipe.training.placement, *join(recipe.training.placement))
    store = open_stores(recipe).derived
    target = _from_lead(placement, lambda: target_fingerprint(recipe.target.path))
    run = run_name(recipe, training_set, target)
    finished = store.find_record(f"drafter_checkpoint/{run}/manifest.json", DrafterCheckpoint)
    if finished is not None:
        if placement.lead:
            store.put_record(LATEST, RunPointer(run=run))
        return finished
    folder = recipe.storage.work_dir / "drafter_checkpoint" / run
    with readable_failures(recipe), _locked(folder, placement):
        identity = _identity(recipe, training_set, target, placement)
        checkpoints = CheckpointFolder(folder / "checkpoints", identity, recipe.training.keep_checkpoints)
        files = RunFiles(store, run, folder, checkpoints, RemoteCheckpoints(store, run))
        outcome = _train(recipe, training_set, placement, files, on_step, stop or StopRequest())
        if not placement.lead:
            return _await_manifest(store, run)
        made_from = {
            "run": run,
            "recipe": recipe.name,
            "code_version": TRAINING_VERSION,
            "training_set": training_set.hash,
            "gate": gate,
            "target_fingerprint": target,
            "tokenizer_sha256": tokenizer_sha256(recipe),
        }
        return _publish(files, made_from, outcome, [shard.partition for shard in training_set.shards])


@dataclass(frozen=True)
class RunFiles:
    """Where a run keeps what it writes."""

    store: Store
    run: str
    folder: Path
    checkpoints: CheckpointFolder
    remote: RemoteCheckpoints

    @property
    def metrics(self) -> Path:
        """JSON lines, one a step."""
        return self.folder / METRICS


@dataclass(frozen=True)
class Outcome:
    """A finished training."""

    progress: Progress
    config: DrafterConfig
    masters: dict[str, torch.Tensor]
    coverage: torch.Tensor
    """[F, 6] over all ranks."""


def _train(
    recipe: Recipe,
    training_set: TrainingSet,
    placement: RankPlacement,
    files: RunFiles,
    on_step: OnStep,
    stop: StopRequest,
) -> Outcome:
    """Load everything, continue from the newest checkpoint, train to the end."""
    rows = _on_lead_first(
        placement,
        lambda: open_rows(files.store, training_set, recipe.storage.work_dir, recipe.storage.downloads),
    )
    config = drafter_config(recipe, read_target_config(recipe.target.path), tokenizer_mask_id(recipe.tokenizer_path))
    require_fitting(rows, config, recipe)
    data = make_data(rows, recipe, config, placement)
    learner = make_learner(recipe, config, placement.drafter, len(training_set.shards))
    feed = make_feed(recipe, config, placement)
    epochs = data.loader.epoch_steps * recipe.training.epochs
    steps = min(epochs, recipe.training.max_steps or epochs)
    progress = _continue(learner, files, placement)
    recorder: Recorder = Follower()
    if placement.lead:
        recorder = LeadRecorder(files.checkpoints, files.remote, files.metrics, progress.step, on_step)
    trainer = Trainer(recipe.training, data, feed, learner, recorder, steps)
    try:
        progress = trainer.run(progress, stop)
    finally:
        recorder.close()
    masters, _ = learner.state()
    return Outcome(progress, config, masters, learner.reduced_coverage())


def _continue(learner: Learner, files: RunFiles, placement: RankPlacement) -> Progress:
    """Put the newest checkpoint into every rank's learner; returns how far it was."""
    snapshot = resume(files.checkpoints, files.remote, files.metrics) if placement.lead else None
    progress = _from_lead(placement, lambda: snapshot.progress if snapshot else Progress())
    masters, moments = learner.live_state()
    if snapshot is not None:
        require_tensors(snapshot, masters, moments)
        for live, saved in ((masters, snapshot.masters), (moments, snapshot.moments)):
            for name, tensor in live.items():
                tensor.copy_(saved[name])
        learner.coverage.copy_(snapshot.coverage)
    if progress.step and placement.ranks > 1:
        for tensor in (*masters.values(), *moments.values()):
            distributed.broadcast(tensor, 0)
    return progress


def _publish(files: RunFiles, made_from: dict[str, Any], outcome: Outcome, partitions: list[str]) -> DrafterCheckpoint:
    """Upload weights, config and metrics, then the manifest that names them, then the pointer to it."""
    below = f"drafter_checkpoint/{files.run}/"
    final = files.folder / "final"
    final.mkdir(exist_ok=True)
    save_drafter(final, outcome.config, outcome.masters, torch.float32, shard_bytes=1 << 62)
    progress = outcome.progress
    checkpoint = DrafterCheckpoint(
        **made_from,
        steps=progress.step,
        train_s=progress.train_s,
        final_loss=progress.final_loss,
        held_out_accepted_prefix=progress.held_out_accepted_prefix,
        weights=upload_file(files.store, below + WEIGHTS_FILE, final / WEIGHTS_FILE),
        config=upload_file(files.store, below + CONFIG_FILE, final / CONFIG_FILE),
        metrics=upload_file(files.store, below + METRICS, files.metrics),
        coverage=_coverage(outcome.coverage, partitions),
        skipped_steps=progress.skipped_steps,
        skipped_rows=progress.skipped_rows,
    )
    files.store.put_record(below + "manifest.json", checkpoint)
    files.store.put_record(LATEST, RunPointer(run=files.run))
    files.remote.clear()
    shutil.rmtree(files.checkpoints.path, ignore_errors=True)
    return checkpoint


def _coverage(sums: torch.Tensor, partitions: list[str]) -> tuple[FileCoverage, ...]:
    assert COVERAGE_COLUMNS == ("rows", "tokens", "blocks", "loss", "weight", "prefix")
    return tuple(
        FileCoverage(
            partition=partition,
            rows=int(rows),
            tokens=int(tokens),
            blocks=int(blocks),
            mean_loss=loss / weight if weight else 0.0,
            joint_accepted_prefix=1.0 + (prefix / blocks if blocks else 0.0),
        )
        for partition, (rows, tokens, blocks, loss, weight, prefix) in zip(partitions, sums.tolist(), strict=True)
    )


def _identity(recipe: Recipe, training_set: TrainingSet, target: str, placement: RankPlacement) -> dict[str, str]:
    """What a checkpoint was made from, field by field; a resume with any other is refused."""
    return {
        "code_version": TRAINING_VERSION,
        "training_set": training_set.hash,
        "target and tokenizer": target,
        "seed": str(recipe.seed),
        "drafter": recipe.drafter.model_dump_json(exclude={"warm_start"}),
        "training": recipe.training.model_dump_json(exclude=NOT_IN_NAME),
        "drafters (ranks)": str(placement.ranks),
        "training.batch_rows": str(recipe.training.batch_rows),
        "training.accumulation": str(recipe.training.accumulation),
    }


def _require_same_tokenization(recipe: Recipe, training_set: TrainingSet) -> None:
    ours = fingerprint(recipe)
    if training_set.fingerprint != ours:
        raise IncompatibleError(
            f"training set {training_set.hash} was tokenized under fingerprint {training_set.fingerprint}, the "
            f"recipe's tokenizer, template and rules now give {ours}; tokenize and freeze again, or restore them"
        )


def _folder_sha256(folder: Path) -> str:
    read_config(folder)
    files = [folder / CONFIG_FILE, *sorted(folder.glob("*.safetensors"))]
    return hashlib.sha256("".join(sha256_file(file) for file in files).encode()).hexdigest()


@contextmanager
def _locked(folder: Path, placement: RankPlacement) -> Iterator[None]:
    """One training of a run at a time on a machine; the lock goes with the process.

    Raises:
        UserError: another process trains this run.
    """
    if not placement.lead:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"another process is training {folder.name} already (it holds {folder / 'lock'})") from None
        yield


def _from_lead(placement: RankPlacement, make: Callable[[], Shared]) -> Shared:
    """The lead's value on every rank."""
    if placement.ranks == 1:
        return make()
    box = [make() if placement.lead else None]
    distributed.broadcast_object_list(box, 0)
    value = box[0]
    assert value is not None
    return value


def _on_lead_first(placement: RankPlacement, make: Callable[[], Shared]) -> Shared:
    """Make something on every rank; the lead first, so that the others find its files."""
    if placement.ranks == 1:
        return make()
    if not placement.lead:
        distributed.barrier()
        return make()
    value = make()
    distributed.barrier()
    return value


def _await_manifest(store: Store, run: str) -> DrafterCheckpoint:
    """Wait for the lead to publish; its death ends this process."""
    while True:
        checkpoint = store.find_record(f"drafter_checkpoint/{run}/manifest.json", DrafterCheckpoint)
        if checkpoint is not None:
            return checkpoint
        time.sleep(1.0)
