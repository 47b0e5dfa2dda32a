"""A training run from recipe and training set to a finished checkpoint in the store; the same inputs, the same run.

The trade-off: a run that was done is found by its name and not done again, so every rank asks the store before it loads
anything; who a run is, `identity` says.
"""

import fcntl
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, TypeVar

from torch import distributed

from dflash_core import TRAINING_VERSION
from dflash_core.batches.cache import open_rows
from dflash_core.drafter.config import drafter_config, read_target_config, tokenizer_mask_id
from dflash_core.drafter.runs import LATEST, checkpoint_key, settings_key
from dflash_core.drafter.target_files import target_fingerprint, tokenizer_sha256
from dflash_core.errors import IncompatibleError, UserError
from dflash_core.quality.training_set import load_training_set, require_gate
from dflash_core.recipe import Recipe
from dflash_core.records import DrafterCheckpoint, RunPointer, TrainingSet
from dflash_core.storage.store import Store, open_stores
from dflash_core.tokenization.fingerprint import fingerprint
from dflash_core.training.checkpoint import CheckpointFolder, Progress, require_tensors
from dflash_core.training.failures import readable_failures
from dflash_core.training.identity import identity, refuse_changed_recipe, run_name
from dflash_core.training.metrics import Report, StepMetrics
from dflash_core.training.placement import RankPlacement, join, place
from dflash_core.training.probing import MakeProbe, Probed
from dflash_core.training.publish import (
    CHECKPOINTS,
    Outcome,
    RunFiles,
    choose_weights,
    clear_checkpoints,
    publish_run,
)
from dflash_core.training.recorder import LeadRecorder, RemoteCheckpoints, resume
from dflash_core.training.setup import make_data, make_learner, make_targets, require_fitting
from dflash_core.training.step import Learner
from dflash_core.training.trackers import open_trackers
from dflash_core.training.trainer import Follower, Recorder, StopRequest, Trainer

log = logging.getLogger(__name__)
Shared = TypeVar("Shared")


def train_drafter(
    recipe: Recipe,
    training_set_hash: str | None,
    accept_failed_gate: bool,
    on_step: Report,
    stop: StopRequest | None = None,
    make_probe: MakeProbe | None = None,
) -> DrafterCheckpoint:
    """Train the drafter the recipe describes, or return its checkpoint if that has been done.

    Called once in each process of the run (see `launch`); continues from the newest checkpoint of this run.

    Args:
        training_set_hash: which training set; None: the one frozen last.
        accept_failed_gate: train although the gate failed; recorded in the result.
        on_step: called on the lead rank after each step.
        stop: ask it to end the run early, with a checkpoint.
        make_probe: makes what measures acceptance during training, where the recipe asks for it; None: nothing does.

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
    target = _from_lead(placement, lambda: target_fingerprint(recipe.target.path, recipe.storage.work_dir))
    run = run_name(recipe, training_set, target)
    finished = store.find_record(checkpoint_key(run), DrafterCheckpoint)
    folder = recipe.storage.work_dir / "drafter_checkpoint" / run
    remote = RemoteCheckpoints(store, run)
    if finished is not None:
        if placement.lead:
            store.put_record(LATEST, RunPointer(run=run))
            clear_checkpoints(remote, folder / CHECKPOINTS)  # a kill after the manifest left them
        return finished
    with readable_failures(recipe), _locked(folder, placement):
        made_with = identity(recipe, training_set, target, placement)
        if placement.lead:
            refuse_changed_recipe(recipe, store, run, made_with)
        checkpoints = CheckpointFolder(folder / CHECKPOINTS, made_with, recipe.training.keep_checkpoints)
        files = RunFiles(store, run, folder, checkpoints, remote)
        outcome = _train(recipe, training_set, placement, files, Watch(on_step, stop or StopRequest(), make_probe))
        if not placement.lead:
            return _await_manifest(store, run)
        made_from = {
            "run": run,
            "recipe": recipe.name,
            "settings": store.put(settings_key(run), recipe.without_secrets(), "application/json"),
            "code_version": TRAINING_VERSION,
            "training_set": training_set.hash,
            "gate": gate,
            "target_fingerprint": target,
            "tokenizer_sha256": tokenizer_sha256(recipe),
        }
        return publish_run(files, made_from, outcome, [shard.partition for shard in training_set.shards])


class Watch(NamedTuple):
    """Who looks at a training, and who may end it."""

    on_step: Report
    stop: StopRequest
    make_probe: MakeProbe | None


def _train(
    recipe: Recipe,
    training_set: TrainingSet,
    placement: RankPlacement,
    files: RunFiles,
    watch: Watch,
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
    make_probe = watch.make_probe if placement.lead and len(data.held_out_rows) else None
    targets = make_targets(
        recipe, config, placement, make_probe is not None and recipe.training.acceptance_every_steps > 0
    )
    probe = None
    if make_probe is not None and targets.whole is not None:
        probe = make_probe(Probed(recipe, targets.whole, learner.drafter, learner.head, rows, data.held_out_rows))
    epochs = data.loader.epoch_steps * recipe.training.epochs
    steps = min(epochs, recipe.training.max_steps or epochs)
    progress = _continue(learner, files, placement)
    with _recorder(recipe, placement, files, progress.step, watch.on_step) as recorder:
        trainer = Trainer(recipe.training, data, targets.feed, learner, recorder, steps, probe)
        progress = trainer.run(progress, watch.stop)
    step, masters = progress.step, learner.state()[0]
    if placement.lead:
        step, masters = choose_weights(recipe.training.publish, files, progress, masters)
    return Outcome(progress, config, masters, step, learner.reduced_coverage())


@contextmanager
def _recorder(
    recipe: Recipe, placement: RankPlacement, files: RunFiles, steps_done: int, on_step: Report
) -> Iterator[Recorder]:
    """The lead's writes metrics and checkpoints, tells the trackers and shows each step; the others' does nothing."""
    if not placement.lead:
        yield Follower()
        return
    with open_trackers(recipe.training.trackers, files.run, files.folder, steps_done) as track:

        def report(metrics: StepMetrics) -> None:
            track(metrics)
            on_step(metrics)

        recorder = LeadRecorder(files.checkpoints, files.remote, files.metrics, steps_done, report)
        try:
            yield recorder
        finally:
            recorder.close()


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


def _require_same_tokenization(recipe: Recipe, training_set: TrainingSet) -> None:
    ours = fingerprint(recipe)
    if training_set.fingerprint != ours:
        raise IncompatibleError(
            f"training set {training_set.hash} was tokenized under fingerprint {training_set.fingerprint}, the "
            f"recipe's tokenizer, template and rules now give {ours}; tokenize and freeze again, or restore them"
        )


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
        checkpoint = store.find_record(checkpoint_key(run), DrafterCheckpoint)
        if checkpoint is not None:
            return checkpoint
        time.sleep(1.0)
