"""What the feed refuses, and what it prepares for the way to a GPU."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from dflash_core.drafter.anchors import DocumentAnchors, stack_blocks
from dflash_core.drafter.visibility import TILE
from dflash_core.recipe import Recipe
from dflash_core.training.feed import FeatureFeed, Preparation, Work, prepare
from dflash_core.training.placement import RankPlacement
from dflash_core.training.setup import make_data
from dflash_core.training.target import load_target
from tests.training.conftest import random_rows, row_store
from tests.training.test_step import CONFIG, CPU, PREPARATION, full_batch


@pytest.fixture
def work() -> Work:
    return prepare(full_batch(row_store({"a": random_rows(0, 8)})), PREPARATION)


def test_a_packed_row_is_refused(work: Work, target_folder: Path) -> None:
    """Linear attention (Qwen3.5) would carry one document into the next, and nothing would be seen of it."""
    target = load_target(target_folder, CONFIG.target_layer_ids, torch.float32, CPU)
    documents = [[DocumentAnchors(0, 10, np.array([2])), DocumentAnchors(10, 20, np.array([3]))]] * 4
    packed = Work(**{**vars(work), "blocks": stack_blocks(documents)})
    with pytest.raises(ValueError, match="one document a row"):
        next(FeatureFeed([target], CPU, 1).feed([packed]))


def test_all_that_travels_is_pinned_for_a_gpu_and_nothing_else_changes(
    work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned: list[int] = []

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        copy = tensor.clone()
        pinned.append(id(copy))
        kept.append(copy)
        return copy

    kept: list[torch.Tensor] = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    for_gpu = prepare(work.batch, Preparation(**{**vars(PREPARATION), "pin": True}))
    travels = [for_gpu.batch.ids, *for_gpu.blocks, *for_gpu.targets[:3]]
    travels += [for_gpu.anchor_tokens, for_gpu.positions, for_gpu.files, for_gpu.lengths]
    assert all(id(tensor) in pinned for tensor in travels)
    plain = [work.batch.ids, *work.blocks, *work.targets[:3]]
    plain += [work.anchor_tokens, work.positions, work.files, work.lengths]
    assert all(torch.equal(a, b) for a, b in zip(travels, plain, strict=True))
    assert for_gpu.targets.bounds == work.targets.bounds
    assert len(pinned) == len(travels)
    prepare(work.batch, PREPARATION)
    assert len(pinned) == len(travels)  # on a CPU nothing is pinned


@pytest.mark.parametrize(("drafter", "fewest"), [("cpu", 1), ("cuda", 128 // 4 + 1)])
def test_on_a_gpu_a_row_of_few_anchors_has_as_many_tiles_as_others(
    drafter: str, fewest: int, make_recipe: Callable[..., Recipe]
) -> None:
    """Else one rank compiles a kernel in the midst of a step, and the others take it for dead."""
    placement = RankPlacement(0, 1, torch.device(drafter), (CPU,))
    rows = row_store({"a": [("a:1", list(range(30)), [(10, 12)])]})  # one token may be an anchor
    data = make_data(rows, make_recipe(held_out_share=0.0, batch_rows=1), CONFIG, placement)
    preparation = replace(data.preparation, pin=False)
    work = prepare(next(data.loader.batches(0, 1)), preparation)
    assert work.blocks.anchor.shape == (1, fewest)
    assert work.blocks.valid.sum() == 1
    assert (fewest - 1) * CONFIG.block_size in (0, TILE)
