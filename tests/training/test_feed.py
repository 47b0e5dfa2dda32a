"""What the feed refuses, and what it prepares for the way to a GPU."""

from pathlib import Path

import numpy as np
import pytest
import torch

from dflash_core.drafter.anchors import DocumentAnchors, stack_blocks
from dflash_core.training.feed import FeatureFeed, Preparation, Work, prepare
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
