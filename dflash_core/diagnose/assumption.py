"""A drafter measured as if one thing about it were otherwise, on recorded text and without decoding.

The trade-off: teacher-forced blocks on a few rows cost one pass of the target and one of the drafter for each
assumption, so dozens can be tried; what they give is the accepted prefix that training reports, not serving's count.
Shapes: B rows, S tokens, N blocks, K block size, L captured layers, H hidden size, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from dflash_core.batches.loader import Batch
from dflash_core.decoding.acceptance import StepCounts
from dflash_core.drafter.config import DrafterConfig
from dflash_core.drafter.model import Drafter, embed_blocks
from dflash_core.drafter.objective import SlotWeights, block_loss
from dflash_core.target.cached import CachedTarget
from dflash_core.training.features import Preparation, PreparedBatch, prepare

ANCHORS = 24
"""Blocks of a row."""
BATCH = 4
CHUNK_ROWS = 1024


@dataclass(frozen=True)
class RecordedAnswer:
    """A document and which of its tokens an answer is."""

    name: str
    ids: tuple[int, ...]
    answer: int
    """Index of the first token of the answer; it goes on to the end."""


@dataclass(frozen=True)
class Assumption:
    """How the drafter may have been trained, where that is not what its config and serving say."""

    what: str
    config: DrafterConfig
    feature_shift: int = 0
    """Place p of the context holds the feature of token p - feature_shift."""
    block_shift: int = 0
    """What the positions of blocks are ahead of their true distance from the context."""
    embedding: Tensor | None = None
    """[V, H] in place of the target's."""
    lm_head: Tensor | None = None
    """[V, H] in place of the target's."""


def accepted_prefixes(
    drafter: Drafter, target: CachedTarget, texts: Sequence[RecordedAnswer], assumptions: Sequence[Assumption]
) -> list[StepCounts]:
    """For each assumption the counts of each text: accepted prefixes summed over its blocks, and blocks."""
    layers = sorted({layer for assumption in assumptions for layer in assumption.config.target_layer_ids})
    counts: list[list[StepCounts]] = [[] for _ in assumptions]
    for first in range(0, len(texts), BATCH):
        prepared = prepare_texts(texts[first : first + BATCH], drafter.config.block_size).to(target.device)
        outputs = target.features(prepared.batch.ids.to(target.device), layers)
        for into, assumption in zip(counts, assumptions, strict=True):
            with torch.no_grad():
                hidden = block_states(drafter, target, prepared, outputs, assumption)
                lm_head = target.lm_head if assumption.lm_head is None else assumption.lm_head
                sums = block_loss(hidden, lm_head, prepared.targets, SlotWeights("decay", 4.0))
            into.append(torch.stack((sums.row_prefix, sums.row_blocks), 1).double().cpu().numpy())
    return [np.concatenate(parts) for parts in counts]


def block_states(
    drafter: Drafter,
    target: CachedTarget,
    prepared: PreparedBatch,
    outputs: Mapping[int, Tensor],
    assumption: Assumption,
) -> Tensor:
    """The drafter's output [B, N*K, H] under an assumption, from the outputs of the target's layers [B, S, H]."""
    features = torch.cat([outputs[layer] for layer in assumption.config.target_layer_ids], -1)
    shift = assumption.feature_shift
    features = F.pad(features, (0, 0, shift, -shift))
    embedding = target.embedding if assumption.embedding is None else assumption.embedding
    inputs = embed_blocks(embedding, prepared.anchor_tokens, assumption.config, assumption.config.block_size)
    # RoPE knows only distances: to move the blocks ahead is to move the context back.
    positions = prepared.positions - assumption.block_shift
    hidden: Tensor = with_config(drafter, assumption.config)(features, positions, inputs, prepared.blocks)
    return hidden


def with_config(drafter: Drafter, config: DrafterConfig) -> Drafter:
    """The same weights, not copied, under another config of the same shapes."""
    if config == drafter.config:
        return drafter
    with torch.device("meta"):
        other = Drafter(config)
    other.load_state_dict(drafter.state_dict(keep_vars=True), assign=True)
    return other.eval()


def prepare_texts(texts: Sequence[RecordedAnswer], block_size: int) -> PreparedBatch:
    """Texts as a right-padded micro-batch with its blocks, the same ones every time; on the CPU."""
    width = max(len(text.ids) for text in texts)
    ids = torch.zeros(len(texts), width, dtype=torch.int64)
    mask = torch.zeros(len(texts), width, dtype=torch.bool)
    for line, text in enumerate(texts):
        ids[line, : len(text.ids)] = torch.tensor(text.ids)
        mask[line, text.answer : len(text.ids)] = True
    batch = Batch(
        step=0,
        epoch=0,
        last=True,
        row_ids=tuple(text.name for text in texts),
        files=torch.zeros(len(texts), dtype=torch.int64),
        ids=ids,
        lengths=torch.tensor([len(text.ids) for text in texts]),
        loss_mask=mask,
    )
    return prepare(batch, Preparation(0, ANCHORS, block_size, CHUNK_ROWS))
