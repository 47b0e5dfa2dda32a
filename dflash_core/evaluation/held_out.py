"""What evaluation and diagnosis look at: a drafter, its whole target, and rows that training never saw."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_core.batches.loader import RowSplit, split_rows
from dflash_core.batches.rows import RowStore, open_rows
from dflash_core.drafter.config import DrafterConfig, check_fit
from dflash_core.drafter.folder import build_drafter
from dflash_core.drafter.model import Drafter
from dflash_core.recipe import Recipe
from dflash_core.target.cached import CachedTarget, load_cached_target
from dflash_core.target.files import read_target_config
from dflash_core.tokenization.tokenizer import ChatTokenizer, load_tokenizer
from dflash_core.training_set.freeze import load_training_set
from dflash_core.workspace import Workspace


@dataclass(frozen=True)
class HeldOut:
    """What is asked, and how it is read; no weights."""

    recipe: Recipe
    tokenizer: ChatTokenizer
    rows: RowStore
    split: RowSplit


@dataclass(frozen=True)
class Subject(HeldOut):
    """Everything loaded, on its device."""

    config: DrafterConfig
    drafter: Drafter
    target: CachedTarget


def open_held_out(workspace: Workspace, config: DrafterConfig, training_set_hash: str | None) -> HeldOut:
    """Open the rows of a training set for a drafter, after seeing that it fits the target.

    Args:
        workspace: its recipe names target, tokenizer and seed.
        config: the drafter's.
        training_set_hash: whose rows; None: those of the one frozen last.

    Raises:
        IncompatibleError: drafter and target do not fit; the message holds both values.
        UserError: no such training set.
    """
    recipe = workspace.recipe
    check_fit(config, read_target_config(recipe.target.path))
    training_set = load_training_set(workspace.derived, training_set_hash)
    rows = open_rows(workspace.derived, training_set, workspace.work_dir, recipe.storage.downloads)
    return HeldOut(
        recipe=recipe,
        tokenizer=load_tokenizer(recipe.tokenizer_path, recipe.tokenization),
        rows=rows,
        split=split_rows(rows, recipe.seed, recipe.training.held_out_share),
    )


def load_subject(held_out: HeldOut, config: DrafterConfig, state: dict[str, Tensor]) -> Subject:
    """Load drafter and target for the rows. Sets this process's torch threads to `training.placement.threads`.

    Args:
        held_out: the rows; its recipe names target and device.
        config: the drafter's.
        state: its tensors.

    Raises:
        RecipeError: the target cannot be loaded.
    """
    recipe = held_out.recipe
    if recipe.training.placement.threads:
        torch.set_num_threads(recipe.training.placement.threads)
    dtype, device = getattr(torch, recipe.target.dtype), torch.device(recipe.training.placement.targets[0])
    return Subject(
        recipe=recipe,
        tokenizer=held_out.tokenizer,
        rows=held_out.rows,
        split=held_out.split,
        config=config,
        drafter=build_drafter(config, state, dtype).to(device).eval(),
        target=load_cached_target(recipe.target.path, config.target_layer_ids, dtype, device),
    )
