"""Cross-entropy of block slots under the frozen lm_head, without ever holding the logits of all slots.

The trade-off: because the head is frozen, a chunk of rows computes its logits, its loss and at once the gradient of its
hidden rows, in one buffer that the next chunk reuses. Same arithmetic as the plain formulation, nothing recomputed in
backward; the price is a gradient computed even if nobody asks for it later (under no_grad it is skipped).

Sums are returned, never means: one global sum of weights divides elsewhere, so that any number of workers and any
accumulation give the same update.
Shapes: B rows, S context tokens, N blocks, K block size, H hidden size, V vocabulary, R supervised slots.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from dflash_core.drafter.attention import Blocks


@dataclass(frozen=True)
class SlotWeights:
    """How the slots of a block count.

    decay: w_k = exp(-(k-1)/gamma), the DFlash paper.
    dpace (arXiv 2605.18810), detached: w_j = sum over supervised m >= j of prod over i <= m of q_i, with
    q = (1-alpha)*p + alpha and p = exp(-ce); unsupervised slots are neutral.
    """

    kind: Literal["decay", "dpace"]
    gamma: float
    alpha: float = 0.5


class SlotTargets(NamedTuple):
    """The R slots that have a loss, in block order. Made on the CPU, so that nothing waits for the device later."""

    row: Tensor
    """int64 [R]: index into the B*N*K drafter outputs."""
    label: Tensor
    """int64 [R]: token that the slot must predict (the token at its own position)."""
    valid: Tensor
    """bool [B, N]: the blocks that are no padding."""
    bounds: tuple[int, ...]
    """Chunks are R[bounds[i]:bounds[i+1]]; none splits a block."""
    block_size: int

    def to(self, device: torch.device | str) -> "SlotTargets":
        """The same on another device, without waiting for the copy."""
        row, label, valid = (t.to(device, non_blocking=True) for t in (self.row, self.label, self.valid))
        return SlotTargets(row, label, valid, self.bounds, self.block_size)


class LossSums(NamedTuple):
    """Sums over the slots; only `loss` has a gradient."""

    loss: Tensor
    """Scalar: sum of weight * cross-entropy, nats."""
    weight: Tensor
    """Scalar: sum of weights."""
    row_loss: Tensor
    """[B]: `loss` per row."""
    row_weight: Tensor
    """[B]: `weight` per row."""
    row_prefix: Tensor
    """[B]: length of the all-correct prefix (slots 1, 2, ... up to the first miss), summed over the row's blocks."""
    row_blocks: Tensor
    """[B]: blocks that are no padding. Mean accepted prefix = row_prefix / row_blocks + 1 (the anchor)."""
    slot_hits: Tensor
    """[B, K-1]: right predictions in slots 1..K-1."""
    slot_counts: Tensor
    """[B, K-1]: supervised slots."""


def slot_targets(input_ids: Tensor, loss_mask: Tensor, blocks: Blocks, block_size: int, chunk_rows: int) -> SlotTargets:
    """Which slots are supervised, and by which token: slot k >= 1 by token anchor+k, if the loss mask has that token.

    Args:
        input_ids: int64 [B, S].
        loss_mask: bool [B, S].
        blocks: on the same device (the CPU).
        block_size: K.
        chunk_rows: rows of logits to hold at once; raised to K-1 where smaller.
    """
    slot = torch.arange(block_size, device=input_ids.device)
    token = blocks.anchor[..., None] + slot  # [B, N, K]
    inside = blocks.valid[..., None] & (slot > 0) & (token < blocks.end[..., None])
    token = token.clamp(max=input_ids.shape[1] - 1).flatten(1)
    supervised = inside.flatten(1) & loss_mask.gather(1, token)
    row = supervised.flatten().nonzero()[:, 0]
    label = input_ids.gather(1, token).flatten()[row]
    return SlotTargets(row, label, blocks.valid, _chunk_bounds(row // block_size, chunk_rows), block_size)


def _chunk_bounds(block: Tensor, chunk_rows: int) -> tuple[int, ...]:
    """Cut rows, given with their ascending block numbers, at block ends into chunks of at most `chunk_rows`."""
    counts = torch.unique_consecutive(block, return_counts=True)[1].tolist()
    bounds, end = [0], 0
    for count in counts:
        if end > bounds[-1] and end + count - bounds[-1] > chunk_rows:
            bounds.append(end)
        end += count
    return (*bounds, end) if end else (0,)


def block_loss(hidden: Tensor, lm_head: Tensor, targets: SlotTargets, weights: SlotWeights) -> LossSums:
    """Weighted cross-entropy sums of all supervised slots.

    Args:
        hidden: [B, N*K, H], the drafter's output.
        lm_head: [V, H], frozen; its dtype is that of the matrix products.
        targets: on the same device.
        weights: how slots count.

    Raises:
        ValueError: lm_head requires a gradient, which would silently be missing.
    """
    if lm_head.requires_grad:
        raise ValueError("lm_head must be frozen; call requires_grad_(False) on it")
    (B, N), K = targets.valid.shape, targets.block_size
    rows = hidden.flatten(0, 1).index_select(0, targets.row)
    loss, ce, hit, weight = _FrozenHead.apply(rows, lm_head, targets, weights)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        sample, slot = targets.row // (N * K), targets.row % K - 1
        hits = torch.zeros(B * N * K, dtype=torch.bool, device=hit.device)
        hits[targets.row] = hit
        prefix = hits.view(B, N, K)[..., 1:].long().cumprod(-1).sum((1, 2))

        def total(values: Tensor, index: Tensor, size: int) -> Tensor:
            return torch.zeros(size, dtype=values.dtype, device=values.device).index_add_(0, index, values)

        return LossSums(
            loss=loss,
            weight=weight.sum(),
            row_loss=total(weight * ce, sample, B),
            row_weight=total(weight, sample, B),
            row_prefix=prefix,
            row_blocks=targets.valid.sum(1),
            slot_hits=total(hit.long(), sample * (K - 1) + slot, B * (K - 1)).view(B, K - 1),
            slot_counts=total(torch.ones_like(slot), sample * (K - 1) + slot, B * (K - 1)).view(B, K - 1),
        )


class _FrozenHead(torch.autograd.Function):
    """(rows [R, H], lm_head [V, H]) -> sum of w*ce, and per row ce, hit, w without gradient."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, lm_head: Tensor, targets: SlotTargets, weights: SlotWeights
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        wide = torch.promote_types(lm_head.dtype, torch.float32)
        R, want_gradient = rows.shape[0], ctx.needs_input_grad[0]
        ce, weight = (torch.empty(R, dtype=wide, device=rows.device) for _ in range(2))
        hit = torch.empty(R, dtype=torch.bool, device=rows.device)
        gradient = torch.empty_like(rows) if want_gradient else None
        longest = max((b - a for a, b in _pairs(targets.bounds)), default=0)
        buffer = torch.empty(longest, lm_head.shape[0], dtype=lm_head.dtype, device=rows.device)
        with torch.autocast(rows.device.type, enabled=False):
            for first, last in _pairs(targets.bounds):
                part = slice(first, last)
                label = targets.label[part, None]
                logits = torch.mm(rows[part].to(lm_head.dtype), lm_head.t(), out=buffer[: last - first]).to(wide)
                top = logits.max(-1)
                label_logit = logits.gather(1, label)[:, 0]
                powers = logits.sub_(top.values[:, None]).exp_()
                norm = powers.sum(-1)
                ce[part] = norm.log() + top.values - label_logit
                hit[part] = top.indices == label[:, 0]
                weight[part] = _slot_weights(ce[part], targets.row[part], targets.block_size, weights)
                if gradient is not None:
                    # d(w*ce)/d(row) = w * (softmax - onehot) @ W
                    powers.mul_((weight[part] / norm)[:, None]).scatter_add_(1, label, -weight[part, None])
                    gradient[part] = torch.mm(powers.to(lm_head.dtype), lm_head)
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(ce, hit, weight)
        return (weight * ce).sum(), ce, hit, weight

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * outputs[0], None, None, None


def _pairs(bounds: Sequence[int]) -> list[tuple[int, int]]:
    return list(pairwise(bounds))


def _slot_weights(ce: Tensor, row: Tensor, block_size: int, weights: SlotWeights) -> Tensor:
    """Weights of a chunk of whole blocks, see `SlotWeights`; [rows], detached."""
    slot = row % block_size
    if weights.kind == "decay":
        return torch.exp((1 - slot).to(ce.dtype) / weights.gamma)
    block = row // block_size
    # At most one block a row: numbering blocks by change keeps the table small without asking the device.
    number = torch.cat((block.new_zeros(1), (block[1:] != block[:-1]).long())).cumsum(0)
    q = (1 - weights.alpha) * torch.exp(-ce) + weights.alpha
    table = ce.new_ones(len(row), block_size)
    table[number, slot] = q
    supervised = torch.zeros_like(table)
    supervised[number, slot] = supervised.new_ones(())  # a plain 1 would be copied to the device, and waited for
    reached = table.cumprod(1) * supervised
    return reached.flip(1).cumsum(1).flip(1)[number, slot]
