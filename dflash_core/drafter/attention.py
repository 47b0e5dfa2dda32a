"""What a query of a block may see, stated once (`sees`) and rendered for both attention kernels.

The trade-off: CPU trains through SDPA with a boolean mask, since flex attention has no backward there; CUDA through
flex with a block-sparse mask. Sorted anchors make both cheap: a run of neighbouring blocks needs the context only up to
its last anchor, so SDPA gets slices, not the whole matrix, and flex gets its tiles by comparing bounds.

Keys are on one axis: the S context tokens of the row, then the N blocks of K slots. A window is in tokens, the query
counted; None is full attention.
Shapes: B rows, S context tokens, N blocks, K block size, Q = N*K queries, D head dimension, h heads, TQ/TK tiles.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, FlexKernelOptions, flex_attention

TILE = 128
SDPA_QUERIES = 256
"""Queries of one SDPA call: fewer skip more of the context, more cost less overhead."""
MOST_KERNELS = 64
"""Compiled flex kernels of one process; torch's own limit of 8 is passed by a drafter with a window."""
KERNEL: FlexKernelOptions = {"BACKEND": "TRITON"}
"""Below 128 queries torch would take its decoding kernel, which has no tile for three to seven blocks of 16 slots."""


def least_blocks(block_size: int) -> int:
    """So many make two tiles of queries: with fewer, flex is compiled again, while the other ranks wait in a step."""
    return TILE // block_size + 1


class Blocks(NamedTuple):
    """The blocks of B rows, sorted by anchor within a row; all [B, N]. Indices count tokens of the row."""

    anchor: Tensor
    """int64: index of slot 0's token."""
    start: Tensor
    """int64: first token of the anchor's document."""
    end: Tensor
    """int64: one past the document's last token."""
    valid: Tensor
    """bool: False for padding blocks, which see nothing and have no loss."""

    def to(self, device: torch.device | str) -> "Blocks":
        """The same on another device, without waiting for the copy."""
        return Blocks(*(t.to(device, non_blocking=True) for t in self))


def sees(
    blocks: Blocks, shape: tuple[int | Tensor, int], window: int | None, b: Tensor, q: Tensor, kv: Tensor
) -> Tensor:
    """THE predicate: may query `q` of row `b` see key `kv`? Index tensors of any shapes that broadcast.

    A block sees the context of its document strictly before its anchor, and itself. With a window it is causal inside
    itself, and a key is visible iff q_pos - k_pos < window, so the context bound moves with the slot.

    Args:
        blocks: the blocks, on the device of the indices.
        shape: (S, K).
        window: see the module.
        b: row.
        q: query, n*K + slot.
        kv: key on the axis of context and blocks.
    """
    S, K = shape
    block, slot = q // K, q % K
    anchor = blocks.anchor[b, block]
    own, other_slot = (kv - S) // K == block, (kv - S) % K
    context = (kv < S) & (kv < anchor) & (kv >= blocks.start[b, block])
    if window is not None:
        context = context & (kv > anchor + slot - window)
        own = own & (other_slot <= slot) & (other_slot > slot - window)
    return blocks.valid[b, block] & (context | ((kv >= S) & own))


def boolean_mask(blocks: Blocks, shape: tuple[int, int], window: int | None) -> Tensor:
    """The predicate everywhere: bool [B, Q, S + Q]."""
    (S, K), (B, N) = shape, blocks.anchor.shape
    return _region(blocks, shape, window, torch.arange(N * K), torch.arange(S + N * K)).view(B, N * K, S + N * K)


def _region(blocks: Blocks, shape: tuple[int, int], window: int | None, q: Tensor, kv: Tensor) -> Tensor:
    """The predicate for chosen queries and keys: bool [B, len(q), len(kv)]."""
    device = blocks.anchor.device
    rows = torch.arange(blocks.anchor.shape[0], device=device)
    return sees(blocks, shape, window, rows[:, None, None], q.to(device)[:, None], kv.to(device))


def block_mask(blocks: Blocks, shape: tuple[int, int], window: int | None) -> BlockMask:
    """The predicate for flex attention. Tiles come from comparing bounds, so it costs [B, TQ, TK] and no host sync.

    A tile is left out if no block in it reaches it, whole if every query sees all of it, else evaluated by `sees`.
    """
    (S, K), N = shape, blocks.anchor.shape[1]
    Q, device = N * K, blocks.anchor.device
    tiles_q, tiles_kv = -(-Q // TILE), -(-(S + Q) // TILE)
    first_q = torch.arange(tiles_q, device=device) * TILE
    low_block, high_block = first_q // K, ((first_q + TILE - 1) // K).clamp(max=N - 1)
    member = torch.arange(N, device=device)
    inside = (member >= low_block[:, None]) & (member <= high_block[:, None])  # [TQ, N]

    # For each block: the keys in [low, anchor) are seen by at least one of its slots, those in [full_low, anchor) by
    # all of them. A window moves with the slot: slot s sees keys above anchor + s - window, so slot 0 reaches furthest
    # down and the last slot the least.
    reach = 0 if window is None else window
    low = blocks.start if window is None else torch.maximum(blocks.start, blocks.anchor + 1 - reach)
    full_low = blocks.start if window is None else torch.maximum(blocks.start, blocks.anchor + K - reach)

    def over(values: Tensor, where: Tensor, empty: int, largest: bool) -> Tensor:
        """Largest or smallest value of the blocks of each tile, [B, TQ, 1]."""
        filled = values[:, None, :].masked_fill(~where, empty)
        return filled.amax(-1, keepdim=True) if largest else filled.amin(-1, keepdim=True)

    # A tile of queries holds parts of several blocks. Touched: it meets the *widest* bounds of its valid blocks (too
    # wide costs time, never a wrong answer). Whole: it is within the *narrowest* bounds of all its blocks, none of them
    # padding; too wide here would let a query see what it must not. Own keys are never whole: a block sees itself only.
    real = inside & blocks.valid[:, None, :]  # [B, TQ, N]
    first_kv = torch.arange(tiles_kv, device=device) * TILE
    end_kv = first_kv + TILE
    some_context = (first_kv < over(blocks.anchor, real, 0, True)) & (end_kv > over(low, real, S, False))
    some_own = (first_kv < S + (high_block[:, None] + 1) * K) & (end_kv > S + low_block[:, None] * K)
    touched = (some_context & (first_kv < S)) | (some_own & real.any(-1, keepdim=True))
    whole = (
        (end_kv <= over(blocks.anchor, inside, S, False))
        & (first_kv >= over(full_low, inside, 0, True))
        & (real.sum(-1, keepdim=True) == inside.sum(-1, keepdim=True))
        & touched
    )

    # Lengths go in as tensors: as numbers every new length would compile the kernel again.
    context_end, last_query = (torch.full((), n, device=device) for n in (S, Q - 1))

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        del h
        # Kernels also ask for the rest of the last tile, beyond the last query.
        return sees(blocks, (context_end, K), window, b, torch.minimum(q, last_query), kv)

    part_count, part_index = _tile_lists(touched & ~whole)
    whole_count, whole_index = _tile_lists(whole)
    return BlockMask.from_kv_blocks(
        part_count, part_index, whole_count, whole_index, TILE, mask_mod, seq_lengths=(Q, S + Q)
    )


def _tile_lists(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """Boolean [B, TQ, TK] -> counts [B, 1, TQ] and indices of the true ones first [B, 1, TQ, TK], int32."""
    order = torch.argsort(tiles.to(torch.int8), dim=-1, descending=True, stable=True)
    return tiles.sum(-1)[:, None].to(torch.int32), order[:, None].to(torch.int32)


class Attention(Protocol):
    """One step's attention: [B, h, Q, D] queries over [B, h_kv, S + Q, D] keys and values -> [B, h, Q, D]."""

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, window: int | None) -> Tensor: ...


@dataclass(frozen=True)
class _Call:
    """One SDPA call: queries first..last, the context slice they need, and the mask over slice and own blocks."""

    queries: slice
    context: slice
    own: slice
    mask: Tensor


class SdpaAttention:
    """The predicate through SDPA; works everywhere, waits for the device to learn the anchors. Masked rows give 0."""

    def __init__(self, blocks: Blocks, shape: tuple[int, int], windows: Sequence[int | None]) -> None:
        self._calls = {window: _calls(blocks, shape, window) for window in set(windows)}

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, window: int | None) -> Tensor:
        outputs = []
        for call in self._calls[window]:
            part_key, part_value = (torch.cat((t[:, :, call.context], t[:, :, call.own]), 2) for t in (key, value))
            outputs.append(
                F.scaled_dot_product_attention(
                    query[:, :, call.queries], part_key, part_value, attn_mask=call.mask, enable_gqa=True
                )
            )
        return torch.cat(outputs, 2) if len(outputs) > 1 else outputs[0]


def _calls(blocks: Blocks, shape: tuple[int, int], window: int | None) -> list[_Call]:
    (S, K), N = shape, blocks.anchor.shape[1]
    # Anchors are sorted in a row, so neighbouring blocks need nearly the same context. A call takes some of them, over
    # all rows, and as much context as the neediest needs; the mask within that slice is still the predicate's.
    anchor, start, valid = (t.cpu() for t in (blocks.anchor, blocks.start, blocks.valid))
    if window is not None:
        start = torch.maximum(start, anchor + 1 - window)
    ends = torch.where(valid, anchor, 0).amax(0).tolist()
    starts = torch.where(valid, start, S).amin(0).tolist()
    step = max(1, SDPA_QUERIES // K)
    calls = []
    for first in range(0, N, step):
        last = min(first + step, N)
        high = max(ends[first:last])
        low = min(*starts[first:last], high)
        queries = torch.arange(first * K, last * K)
        keys = torch.cat((torch.arange(low, high), S + queries))
        calls.append(
            _Call(
                slice(first * K, last * K),
                slice(low, high),
                slice(S + first * K, S + last * K),
                _region(blocks, shape, window, queries, keys)[:, None],
            )
        )
    return calls


class FlexAttention:
    """The predicate through compiled flex attention, for CUDA; nothing here waits for the device."""

    def __init__(self, blocks: Blocks, shape: tuple[int, int], windows: Sequence[int | None]) -> None:
        self._masks = {window: block_mask(blocks, shape, window) for window in set(windows)}

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, window: int | None) -> Tensor:
        mask = self._masks[window]
        return _compiled_flex()(query, key, value, block_mask=mask, enable_gqa=True, kernel_options=KERNEL)


@cache
def _compiled_flex(backend: str | Callable[..., Any] = "inductor") -> Callable[..., Tensor]:
    """Full or windowed, one row or more, with gradients or without: each is a kernel of its own; lengths are not.

    Beyond the limit it raises, where the default would go on without a kernel and with every score in memory. The limit
    is the process's, which compiles nothing else: an argument of that name is younger than torch 2.11.
    """
    torch._dynamo.config.recompile_limit = MOST_KERNELS
    made: Callable[..., Tensor] = torch.compile(flex_attention, dynamic=True, fullgraph=True, backend=backend)
    return made


def attention(blocks: Blocks, shape: tuple[int, int], windows: Sequence[int | None]) -> Attention:
    """The attention of one step on the device of `blocks`: flex on CUDA, SDPA elsewhere.

    Args:
        blocks: which blocks there are.
        shape: (S, K).
        windows: every window that a layer will ask for.
    """
    kind = FlexAttention if blocks.anchor.is_cuda else SdpaAttention
    return kind(blocks, shape, windows)
