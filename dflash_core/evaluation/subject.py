"""What evaluation and diagnosis look at: a drafter, its whole target, and rows that training never saw."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_core.batches.cache import RowStore, open_rows
from dflash_core.batches.loader import Split, split_rows
from dflash_core.drafter.config import DrafterConfig, check_fit, read_target_config
from dflash_core.drafter.folder import build_drafter
from dflash_core.drafter.model import Drafter
from dflash_core.evaluation.target import VerifyingTarget, load_verifying_target
from dflash_core.quality.training_set import load_training_set
from dflash_core.recipe import Recipe
from dflash_core.storage.store import open_stores
from dflash_core.tokenization.tokenizer import ChatTokenizer, load_tokenizer


@dataclass(frozen=True)
class Subject:
    """Everything loaded, on its device."""

    recipe: Recipe
    config: DrafterConfig
    drafter: Drafter
    target: VerifyingTarget
    tokenizer: ChatTokenizer
    rows: RowStore
    split: Split


def load_subject(
    recipe: Recipe, config: DrafterConfig, state: dict[str, Tensor], training_set_hash: str | None
) -> Subject:
    """Load target and rows beside a drafter. Sets this process's torch threads to `training.placement.threads`.

    Args:
        recipe: names target, stores and seed.
        config: the drafter's.
        state: its tensors.
        training_set_hash: whose held-out rows; None: the one frozen last.

    Raises:
        IncompatibleError: drafter and target do not fit; the message holds both values.
        UserError: no such training set.
    """
    check_fit(config, read_target_config(recipe.target.path))
    if recipe.training.placement.threads:
        torch.set_num_threads(recipe.training.placement.threads)
    training_set = load_training_set(recipe, training_set_hash)
    rows = open_rows(open_stores(recipe).derived, training_set, recipe.storage.work_dir, recipe.storage.downloads)
    dtype, device = getattr(torch, recipe.target.dtype), torch.device(recipe.training.placement.targets[0])
    return Subject(
        recipe=recipe,
        config=config,
        drafter=build_drafter(config, state, dtype).to(device).eval(),
        target=load_verifying_target(recipe.target.path, config.target_layer_ids, dtype, device),
        tokenizer=load_tokenizer(recipe),
        rows=rows,
        split=split_rows(rows, recipe.seed, recipe.training.held_out_share),
    )
