"""A training run from job to finished checkpoint in the store; the same inputs, the same run. Read `train` first.

The trade-off: a run that was done is found by its name and not done a second time, so every rank asks the store before
it loads anything; who a run is, `identity` says.
"""

import errno
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import distributed, nn
from transformers import AutoModelForCausalLM

from dflash_core import TRAINING_VERSION
from dflash_core.batches.loader import Loader, StepShape, held_out_batches, split_rows
from dflash_core.batches.order import uniform_bits
from dflash_core.batches.rows import RowStore, open_rows
from dflash_core.decoding.acceptance import acceptance_length, add_histograms
from dflash_core.decoding.decode import DecodingOptions, decode
from dflash_core.decoding.drafts import DrafterDraft
from dflash_core.decoding.prompts import held_out_prompts
from dflash_core.drafter.attention import least_blocks
from dflash_core.drafter.config import DrafterConfig, drafter_config
from dflash_core.drafter.folder import read_config, read_manifest, read_state, verify_folder
from dflash_core.drafter.model import Drafter
from dflash_core.errors import IncompatibleError, StorageError, UserError
from dflash_core.local_files import locked
from dflash_core.recipe import Recipe
from dflash_core.records import DrafterCheckpoint, TrainingSet
from dflash_core.storage.layout import RunKeys
from dflash_core.target.cached import CachedTarget
from dflash_core.target.files import (
    check_tokenizer,
    load_head,
    read_target_config,
    target_fingerprint,
    tokenizer_mask_id,
    tokenizer_sha256,
)
from dflash_core.target.hooked import HookedTarget, load_frozen, load_target, warn_of_slow_layers
from dflash_core.tokenization.tokenizer import fingerprint
from dflash_core.training.checkpoint import CheckpointFolder, Progress, RunRecorder, require_tensors, resume
from dflash_core.training.features import FeatureFeed, Preparation
from dflash_core.training.identity import CHECKPOINTS, LOCAL_RUNS, identity, refuse_changed_recipe, run_name
from dflash_core.training.job import Job, Rank, StopRequest
from dflash_core.training.metrics import OnStep, StepMetrics
from dflash_core.training.placement import RankPlacement, join, step_group
from dflash_core.training.profiling import profiled, warn_of_no_trace
from dflash_core.training.publish import RunFiles, TrainingResult, publish_run, settle_finished
from dflash_core.training.step import Learner, rules
from dflash_core.training.trackers import open_trackers
from dflash_core.training.trainer import Trainer, TrainingData
from dflash_core.training_set.freeze import load_training_set, require_gate
from dflash_core.workspace import Workspace

REPAIRABLE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EFBIG)
PROBE_TOKENS = 64
"""At most so many new tokens a prompt; enough for some twenty verifications."""


def train(
    workspace: Workspace, job: Job, on_step: OnStep, stop: StopRequest | None = None, rank: Rank | None = None
) -> DrafterCheckpoint:
    """Train the drafter that the recipe describes, or return its checkpoint if that has been done.

    Continues from the newest checkpoint of this run. With several drafters it is called in one process for each, see
    `ranks`, and every one of them gets the checkpoint.

    Args:
        workspace: recipe and stores.
        job: which training set, and how.
        on_step: called on the lead rank after each step.
        stop: ask it to end the run early, with a checkpoint.
        rank: which of several processes this is; None: the only one.

    Raises:
        GateError: the gate failed and the job does not accept that.
        TrainingStopped: asked to stop; the same call continues.
        UserError: anything else that a person can repair; the message says what.
    """
    recipe = workspace.recipe
    training_set = load_training_set(workspace.derived, job.training_set)
    gate = require_gate(training_set, job.accept_failed_gate)
    _require_same_tokenization(recipe, training_set)
    placement = join(recipe.training.placement, rank or Rank())
    target = placement.from_lead(lambda: target_fingerprint(recipe.target.path, workspace.work_dir))
    run = run_name(recipe, training_set, target)
    made_with = identity(recipe, training_set, target, placement)
    folder = workspace.work_dir / LOCAL_RUNS / run
    checkpoints = CheckpointFolder(folder / CHECKPOINTS, made_with, recipe.training.keep_checkpoints)
    files = RunFiles(workspace.derived, RunKeys(run), folder, checkpoints)
    finished = files.store.find_record(files.keys.manifest, DrafterCheckpoint)
    if finished is not None:
        if placement.lead:
            settle_finished(files)  # a kill after the manifest left that to do
            if job.profile:
                warn_of_no_trace(0)
        return finished
    with readable_failures(workspace.work_dir), _locked(folder) if placement.lead else nullcontext():
        if placement.lead:
            refuse_changed_recipe(workspace, run, made_with)
        parts = _load(workspace, training_set, placement)
        progress = _continue(parts.learner, files, placement)
        with _recorder(workspace, placement, files, progress.step, job.profile, on_step) as recorder:
            trainer = Trainer(
                recipe.training, parts.data, parts.feed, parts.learner, parts.steps, recorder, parts.probe
            )
            progress = trainer.run(progress, stop or StopRequest())
        result = TrainingResult(progress, parts.config, parts.learner.state()[0], parts.learner.reduced_coverage())
        made_from = {
            "run": run,
            "recipe": recipe.name,
            "code_version": TRAINING_VERSION,
            "training_set": training_set.hash,
            "gate": gate,
            "target_fingerprint": target,
            "tokenizer_sha256": tokenizer_sha256(recipe),
        }
        return placement.from_lead(lambda: _publish(workspace, files, made_from, result, training_set))


def _publish(
    workspace: Workspace,
    files: RunFiles,
    made_from: dict[str, Any],
    result: TrainingResult,
    training_set: TrainingSet,
) -> DrafterCheckpoint:
    recipe = workspace.recipe
    settings = workspace.derived.put(files.keys.settings, recipe.without_secrets(), "application/json")
    partitions = [shard.partition for shard in training_set.shards]
    return publish_run(files, made_from | {"settings": settings}, result, partitions, recipe.training.publish)


class _Parts(NamedTuple):
    """What a rank trains with."""

    config: DrafterConfig
    data: TrainingData
    learner: Learner
    feed: FeatureFeed
    steps: int
    probe: Callable[[], float] | None


def _load(workspace: Workspace, training_set: TrainingSet, placement: RankPlacement) -> _Parts:
    """Rows, drafter, targets; the acceptance probe on the lead, where the recipe asks for it."""
    recipe, training = workspace.recipe, workspace.recipe.training
    rows = placement.lead_first(
        lambda: open_rows(workspace.derived, training_set, workspace.work_dir, recipe.storage.downloads)
    )
    config = drafter_config(recipe, read_target_config(recipe.target.path), tokenizer_mask_id(recipe.tokenizer_path))
    require_fitting(rows, config, recipe)
    data = make_data(rows, recipe, config, placement)
    learner = make_learner(recipe, config, placement.drafter, len(training_set.shards))
    probes = placement.lead and training.acceptance_every_steps > 0 and len(data.held_out_rows) > 0
    targets, whole = load_targets(recipe, config, placement, probes)
    probe = None if whole is None else acceptance_probe(recipe, whole, learner, rows, data)
    epochs = data.loader.epoch_steps * training.epochs
    steps = min(epochs, training.max_steps or epochs)
    feed = FeatureFeed(targets, placement.drafter, placement.buffers_per_target)
    return _Parts(config, data, learner, feed, steps, probe)


def make_data(rows: RowStore, recipe: Recipe, config: DrafterConfig, placement: RankPlacement) -> TrainingData:
    """Training and held-out micro-batches of this rank.

    Raises:
        UserError: no row is left for training.
    """
    training = recipe.training
    split = split_rows(rows, recipe.seed, training.held_out_share)
    if not len(split.training):
        raise UserError(
            f"all {len(rows)} rows of the training set are held out; lower training.held_out_share or add completions"
        )
    shape = StepShape(training.batch_rows, training.accumulation, placement.rank, placement.ranks)
    drawn = sorted(split.held_out, key=lambda i: uniform_bits("validation", recipe.seed, rows.row_ids[i]))
    chosen = np.sort(np.asarray(drawn[: training.validation_rows], dtype=np.int64))
    preparation = Preparation(
        recipe.seed,
        training.anchors,
        config.block_size,
        training.vocabulary_chunk_rows,
        pin=placement.on_gpus,
        least_blocks=least_blocks(config.block_size) if placement.drafter.type == "cuda" else 1,
    )
    loader = Loader(rows, split.training, recipe.seed, shape)
    return TrainingData(loader, held_out_batches(rows, chosen, shape), preparation, split.held_out)


def make_learner(recipe: Recipe, config: DrafterConfig, device: torch.device, files: int) -> Learner:
    """The drafter with fresh or warm-started weights, the target's ends, and the optimizer, on `device`.

    Raises:
        IncompatibleError: the drafter to start from has another shape, or was trained with another tokenizer.
    """
    drafter = Drafter(config, gradient_checkpointing=recipe.training.gradient_checkpointing)
    drafter.initialize(recipe.seed)
    warm_start = recipe.drafter.warm_start
    if warm_start is not None:
        _require_same_shape(config, read_config(warm_start), warm_start)
        # An exported folder tells whose ids it was trained on, and has to be whole; one from elsewhere tells nothing.
        if read_manifest(warm_start) is not None:
            check_tokenizer(verify_folder(warm_start).tokenizer_sha256, recipe, f"drafter.warm_start {warm_start}")
        drafter.load_state_dict(read_state(warm_start, config))
    how = rules(recipe.training, recipe.gamma, device)
    head = load_head(recipe.target.path, how.autocast or torch.float32, device)
    placement = recipe.training.placement
    return Learner(drafter.to(device), head, how, files, step_group(placement), placement.timeout_s)


def load_targets(
    recipe: Recipe, config: DrafterConfig, placement: RankPlacement, whole: bool
) -> tuple[list[HookedTarget], nn.Module | None]:
    """This rank's targets, and the first one as a causal LM where that is asked for.

    Args:
        recipe: names the target.
        config: which layers are captured.
        placement: where the targets run.
        whole: load the first one with all its layers and lm_head; the features are the same, bit for bit.
    """
    dtype = getattr(torch, recipe.target.dtype)
    first: Any = None
    targets = []
    for device in placement.targets:
        if whole and first is None:
            first = load_frozen(AutoModelForCausalLM, recipe.target.path, dtype).eval().to(device)
            targets.append(HookedTarget(first.get_decoder(), config.target_layer_ids, device))
        else:
            targets.append(load_target(recipe.target.path, config.target_layer_ids, dtype, device))
    if placement.lead:
        warn_of_slow_layers(targets[0], targets[0].device.type)
    return targets, first


def acceptance_probe(
    recipe: Recipe, whole: nn.Module, learner: Learner, rows: RowStore, data: TrainingData
) -> Callable[[], float]:
    """A function that decodes a few held-out prompts with the drafter as it is now and returns the acceptance length.

    The whole target serves training and probe alike: that costs the layers above the deepest captured one in each of
    the lead's forward passes, but no second copy in memory.

    Raises:
        UserError: no held-out row has a prompt.
    """
    drafter = learner.drafter
    target = CachedTarget(whole, drafter.config.target_layer_ids)
    prompts = held_out_prompts(rows, data.held_out_rows, recipe.seed, recipe.training.acceptance_prompts)
    options = DecodingOptions(min(PROBE_TOKENS, recipe.evaluation.max_new_tokens), target.stop_tokens)
    draft = DrafterDraft(drafter, learner.head.embedding, learner.head.lm_head)

    def measure() -> float:
        drafter.eval()
        answers = decode(target, draft, [prompt.ids for prompt in prompts], options, batch=len(prompts))
        drafter.train()
        target.begin()  # no cache outlives the probe
        draft.begin()
        return acceptance_length(add_histograms([answer.histogram for answer in answers]))

    return measure


@contextmanager
def _recorder(
    workspace: Workspace, placement: RankPlacement, files: RunFiles, steps_done: int, profile: bool, on_step: OnStep
) -> Iterator[RunRecorder | None]:
    """The lead's, which also tells the trackers, shows each step and, where asked to, profiles some; None elsewhere."""
    if not placement.lead:
        yield None
        return
    with ExitStack() as stack:
        trackers = workspace.recipe.training.trackers
        reports = [stack.enter_context(open_trackers(trackers, files.keys.run, files.folder, steps_done)), on_step]
        if profile:
            trace = workspace.work_dir / LOCAL_RUNS / f"{workspace.recipe.name}.trace.json.gz"
            reports.append(stack.enter_context(profiled(trace)))

        def report(metrics: StepMetrics) -> None:
            for each in reports:
                each(metrics)

        recorder = RunRecorder(files.checkpoints, files.stored_checkpoints, files.metrics, steps_done, report)
        stack.callback(recorder.close)
        yield recorder


def _continue(learner: Learner, files: RunFiles, placement: RankPlacement) -> Progress:
    """Put the newest checkpoint into every rank's learner; returns how far it was."""
    snapshot = resume(files.checkpoints, files.stored_checkpoints, files.metrics) if placement.lead else None
    progress = placement.from_lead(lambda: snapshot.progress if snapshot else Progress())
    masters, moments = learner.live_state()
    if snapshot is not None:
        require_tensors(snapshot, masters, moments)
        for live, saved in ((masters, snapshot.masters), (moments, snapshot.moments)):
            for name, tensor in live.items():
                tensor.copy_(saved[name])
        learner.coverage.copy_(snapshot.coverage)  # over all ranks: the others begin with zeros
    if progress.step and placement.ranks > 1:
        for tensor in (*masters.values(), *moments.values()):
            distributed.broadcast(tensor, 0)
    return progress


@contextmanager
def readable_failures(work_dir: Path) -> Iterator[None]:
    """Turn a full disk and a full device into what to do about it.

    Raises:
        UserError: instead of the original.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise UserError(
            f"a device has too little memory: {str(error).splitlines()[0]} Lower training.batch_rows or "
            "training.anchors, or set training.gradient_checkpointing"
        ) from error
    except OSError as error:
        if error.errno not in REPAIRABLE:
            raise
        raise StorageError(
            f"cannot write below storage.work_dir {work_dir}: {error}; free disk space or set another "
            "folder, then run the same command again"
        ) from error


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One training of a run at a time on a machine; the lock goes with the process.

    Raises:
        UserError: another process trains this run.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = folder / "lock"
    with locked(lock, UserError(f"another process is training {folder.name} already (it holds {lock})")):
        yield


def require_fitting(rows: RowStore, config: DrafterConfig, recipe: Recipe) -> None:
    """Refuse rows that were tokenized for another target.

    Raises:
        IncompatibleError: a token id is beyond the target's vocabulary.
    """
    largest = rows.largest_id()
    if largest >= config.vocab_size:
        raise IncompatibleError(
            f"the training set holds token id {largest}, but the target {recipe.target.path} has {config.vocab_size} "
            "tokens; tokenize with the target's own tokenizer"
        )


def _require_same_tokenization(recipe: Recipe, training_set: TrainingSet) -> None:
    ours = fingerprint(recipe)
    if training_set.fingerprint != ours:
        raise IncompatibleError(
            f"training set {training_set.hash} was tokenized under fingerprint {training_set.fingerprint}, the "
            f"recipe's tokenizer, template and rules now give {ours}; tokenize and freeze again, or restore them"
        )


def _require_same_shape(ours: DrafterConfig, theirs: DrafterConfig, folder: Path) -> None:
    """A warm start must be the same network: rope, mask token and captured layers included."""
    ignored = {
        "dtype",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "max_position_embeddings",
        "tie_word_embeddings",
    }
    for key, value in asdict(ours).items():
        if key not in ignored and asdict(theirs)[key] != value:
            raise IncompatibleError(
                f"drafter.warm_start {folder} has {key} = {asdict(theirs)[key]}, the recipe's drafter {value}; make "
                "them equal"
            )
