"""What a rank trains with: its data, its drafter and optimizer, its targets."""

from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from dflash_core.batches.cache import RowStore
from dflash_core.batches.loader import Loader, Shape, held_out_batches, split_rows
from dflash_core.batches.split import uniform_bits
from dflash_core.drafter.config import DrafterConfig
from dflash_core.drafter.folder import read_config, read_state
from dflash_core.drafter.model import Drafter
from dflash_core.drafter.placed import read_manifest, verify_folder
from dflash_core.drafter.target_files import check_tokenizer, load_head
from dflash_core.drafter.visibility import least_blocks
from dflash_core.errors import IncompatibleError, UserError
from dflash_core.recipe import Recipe
from dflash_core.training.feed import FeatureFeed, Preparation
from dflash_core.training.placement import RankPlacement, step_group
from dflash_core.training.step import Learner, rules
from dflash_core.training.target import Target, load_frozen, load_target, warn_of_slow_layers
from dflash_core.training.trainer import Data


def make_data(rows: RowStore, recipe: Recipe, config: DrafterConfig, placement: RankPlacement) -> Data:
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
    shape = Shape(training.batch_rows, training.accumulation, placement.rank, placement.ranks)
    drawn = sorted(split.held_out, key=lambda i: uniform_bits("validation", recipe.seed, rows.row_ids[i]))
    chosen = np.sort(np.asarray(drawn[: training.validation_rows], dtype=np.int64))
    return Data(
        Loader(rows, split.training, recipe.seed, shape),
        held_out_batches(rows, chosen, shape),
        Preparation(
            recipe.seed,
            training.anchors,
            config.block_size,
            training.vocabulary_chunk_rows,
            pin=placement.on_gpus,
            least_blocks=least_blocks(config.block_size) if placement.drafter.type == "cuda" else 1,
        ),
        split.held_out,
    )


def make_learner(recipe: Recipe, config: DrafterConfig, device: torch.device, files: int) -> Learner:
    """The drafter with fresh or warm-started weights, the target's ends, and the optimizer, on `device`.

    Raises:
        IncompatibleError: the drafter to start from has another shape.
    """
    drafter = Drafter(config, gradient_checkpointing=recipe.training.gradient_checkpointing)
    drafter.initialize(recipe.seed)
    warm_start = recipe.drafter.warm_start
    if warm_start is not None:
        _require_same_shape(config, read_config(warm_start), warm_start)
        _require_same_tokenizer(recipe, warm_start)
        drafter.load_state_dict(read_state(warm_start, config))
    how = rules(recipe.training, recipe.gamma, device)
    head = load_head(recipe.target.path, how.autocast or torch.float32, device)
    placement = recipe.training.placement
    return Learner(drafter.to(device), head, how, files, step_group(placement), placement.timeout_s)


class Targets(NamedTuple):
    """The targets of this rank."""

    feed: FeatureFeed
    whole: nn.Module | None
    """The first one as a causal LM, where it was asked for."""


def make_targets(recipe: Recipe, config: DrafterConfig, placement: RankPlacement, whole: bool) -> Targets:
    """This rank's targets, and slots between them and the drafter.

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
            targets.append(Target(first.get_decoder(), config.target_layer_ids, device))
        else:
            targets.append(load_target(recipe.target.path, config.target_layer_ids, dtype, device))
    if placement.lead:
        warn_of_slow_layers(targets[0], targets[0].device.type)
    return Targets(FeatureFeed(targets, placement.drafter, placement.slots_per_target), first)


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


def _require_same_tokenizer(recipe: Recipe, folder: Path) -> None:
    """An exported folder tells whose ids it was trained on, and has to be whole; one from elsewhere tells nothing."""
    if read_manifest(folder) is not None:
        check_tokenizer(verify_folder(folder).tokenizer_sha256, recipe, f"drafter.warm_start {folder}")


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
