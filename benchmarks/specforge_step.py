"""SpecForge's own DFlash module on a case of `train_step.py`: the same weights, anchors and inputs.

Its source is given by the user as a checkout; nothing of it is kept here.
"""

import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import Qwen3Config

if TYPE_CHECKING:
    from benchmarks.train_step import Case


def specforge_step(checkout: Path, case: "Case", gamma: float) -> Callable[[], Tensor]:
    """Its forward and backward, with SDPA (its default, flex attention, has no backward on a CPU) and its own chunks.

    Raises:
        SystemExit: the folder is no checkout of SpecForge.
    """
    sys.path.insert(0, str(checkout))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from specforge.algorithms.common.dflash_family_model import OnlineDFlashModel
            from specforge.modeling.draft.dflash import DFlashDraftModel
    except ImportError as error:
        raise SystemExit(f"--specforge {checkout}: {error}; give a checkout of sgl-project/SpecForge") from None
    config = case.drafter.config
    theirs: Any = DFlashDraftModel(Qwen3Config(**config.to_json(), attn_implementation="sdpa"))
    theirs.load_state_dict(case.drafter.state_dict())
    head = nn.Linear(*reversed(case.head.shape), bias=False, device="meta")
    head.weight = nn.Parameter(case.head, requires_grad=False)
    model = OnlineDFlashModel(
        draft_model=theirs.train(),
        target_lm_head=head,
        target_embed_tokens=nn.Embedding.from_pretrained(case.head),
        mask_token_id=config.mask_token_id,
        block_size=config.block_size,
        attention_backend="sdpa",
        num_anchors=case.blocks.anchor.shape[1],
        loss_decay_gamma=gamma,
    )
    anchors = case.blocks.anchor.sort(-1).values  # it sorts, too
    model._sample_anchor_positions = lambda *_: (anchors, torch.ones_like(anchors) > 0)
    mask = torch.ones_like(case.ids, dtype=torch.float32)

    def step() -> Tensor:
        loss, _, _ = model(case.ids, case.features, mask)
        loss.backward()
        answer: Tensor = loss
        return answer

    return step
