"""The drafter network: Qwen3-style decoder layers whose attention also reads the target's features as extra keys.

The trade-off: embedding and lm_head are the target's and stay outside, so the checkpoint is small and the caller embeds
the blocks; in exchange nothing here knows tokens. The features are projected once, and each layer makes its keys and
values for them once, however many blocks attend to them.

Shapes: B rows, S context tokens, N blocks, K block size, Q = N*K, H hidden size, L captured layers, D head dimension,
h heads, g key-value heads.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from dflash_core.drafter.attention import Attention, Blocks, SdpaAttention, attention
from dflash_core.drafter.config import DrafterConfig


class Rotation(NamedTuple):
    """Cosine and sine of positions, [B, 1, tokens, D]."""

    cos: Tensor
    sin: Tensor


class KeyValue(NamedTuple):
    """Keys (normalised and rotated) and values of one layer for the context, [B, g, S, D]."""

    key: Tensor
    value: Tensor


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, statistics in fp32 or better."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype) * self.weight.to(
            x.dtype
        )


class SelfAttention(nn.Module):
    """Grouped-query attention with a norm per head on queries and keys; context and blocks share all projections."""

    def __init__(self, config: DrafterConfig, window: int | None) -> None:
        super().__init__()
        self.head_dim, self.window = config.head_dim, window
        wide, narrow = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, wide, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, narrow, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, narrow, bias=False)
        self.o_proj = nn.Linear(wide, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def key_value(self, x: Tensor, rotation: Rotation) -> KeyValue:
        """Keys and values for `x` [B, tokens, H]."""
        key = self.k_norm(self._heads(self.k_proj(x)))
        return KeyValue(rotate(key, rotation), self._heads(self.v_proj(x)))

    def forward(self, x: Tensor, rotation: Rotation, context: KeyValue, attend: Attention) -> Tensor:
        query = rotate(self.q_norm(self._heads(self.q_proj(x))), rotation)
        own = self.key_value(x, rotation)
        key, value = (torch.cat(pair, 2) for pair in zip(context, own, strict=True))
        out: Tensor = self.o_proj(attend(query, key, value, self.window).transpose(1, 2).flatten(2))
        return out

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], x.shape[1], -1, self.head_dim).transpose(1, 2)


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """A decoder layer; only the blocks are residual state, the context enters as keys and values."""

    def __init__(self, config: DrafterConfig, window: int | None) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = SelfAttention(config, window)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, rotation: Rotation, context: KeyValue, attend: Attention) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rotation, context, attend)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out

    def with_context(
        self, x: Tensor, rotation: Rotation, projected: Tensor, context_rotation: Rotation, attend: Attention
    ) -> Tensor:
        """Like forward, from the projected features; what gradient checkpointing recomputes."""
        return self.forward(x, rotation, self.self_attn.key_value(projected, context_rotation), attend)


class Drafter(nn.Module):
    """The published architecture: 11 tensors a layer and fc, hidden_norm, norm; fp32 parameters.

    Training calls the module; decoding calls `extend` after each verification and `draft` before the next.
    """

    def __init__(self, config: DrafterConfig, *, gradient_checkpointing: bool = False) -> None:
        super().__init__()
        self.config = config
        self.gradient_checkpointing = gradient_checkpointing
        self.windows = tuple(config.window(i) for i in range(config.num_hidden_layers))
        self.layers = nn.ModuleList(Layer(config, window) for window in self.windows)
        self.fc = nn.Linear(config.feature_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def initialize(self, seed: int, gain: float = 1.0) -> None:
        """Set all norms to 1 and all matrices to N(0, gain / sqrt(inputs)); the same for the same seed on any device.

        The customary constant 0.02 is this at a width of 2,500; a narrow drafter that starts with it learns nothing
        from its features for its first hundreds of steps.
        """
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.ndim == 1:
                    parameter.fill_(1.0)
                else:
                    std = gain / parameter.shape[1] ** 0.5
                    parameter.copy_(torch.empty(parameter.shape).normal_(0.0, std, generator=generator))

    def forward(self, features: Tensor, positions: Tensor, block_inputs: Tensor, blocks: Blocks) -> Tensor:
        """All blocks of a batch at once.

        Args:
            features: [B, S, L*H], the target's captured layers side by side.
            positions: [B, S] int64, restarting at 0 with each document.
            block_inputs: [B, Q, H], embedded slots, see `embed_blocks`.
            blocks: where the blocks stand.

        Returns:
            Normed hidden states [B, Q, H], ready for the lm_head; those of padding blocks are finite and meaningless.
        """
        N, S = blocks.anchor.shape[1], features.shape[1]
        K = block_inputs.shape[1] // N
        attend = attention(blocks, (S, K), self.windows)
        projected = self.hidden_norm(self.fc(features))
        context_rotation = self.rotation(positions, projected.dtype)
        slots = torch.arange(K, device=blocks.anchor.device)
        block_positions = ((blocks.anchor - blocks.start)[..., None] + slots).flatten(1)
        rotation = self.rotation(block_positions, projected.dtype)
        x = block_inputs
        for layer in self._decoder():
            if self.gradient_checkpointing and self.training:
                x = checkpoint(
                    layer.with_context, x, rotation, projected, context_rotation, attend, use_reentrant=False
                )
            else:
                x = layer.with_context(x, rotation, projected, context_rotation, attend)
        out: Tensor = self.norm(x)
        return out

    def extend(self, cache: "ContextCache", features: Tensor, counts: Sequence[int] | None = None) -> None:
        """Append the features of each row's next verified tokens to the cache.

        Args:
            cache: of B rows.
            features: [B, s, L*H].
            counts: [B] how many of the s tokens belong to each row; None: all of them.
        """
        projected = self.hidden_norm(self.fc(features))
        device = features.device
        positions = cache.starts(device) + torch.arange(features.shape[1], device=device)
        rotation = self.rotation(positions, projected.dtype)
        new = [layer.self_attn.key_value(projected, rotation) for layer in self._decoder()]
        cache.append(new, counts or [features.shape[1]] * features.shape[0])

    def draft(self, cache: "ContextCache", block_inputs: Tensor) -> Tensor:
        """One block a row, right after its cached context; the cache is only read.

        Args:
            cache: the contexts; a row's length is its anchor's position.
            block_inputs: [B, K, H].

        Returns:
            Normed hidden states [B, K, H].
        """
        device, (S, K) = block_inputs.device, (max(cache.lengths), block_inputs.shape[1])
        at = cache.starts(device)
        # A handful of queries, new lengths at every step: nothing for a kernel that is compiled.
        attend = SdpaAttention(Blocks(at, at * 0, at + K, at >= 0), (S, K), self.windows)
        rotation = self.rotation(at + torch.arange(K, device=device), block_inputs.dtype)
        x = block_inputs
        for layer, context in zip(self._decoder(), cache.read(), strict=True):
            x = layer(x, rotation, context, attend)
        out: Tensor = self.norm(x)
        return out

    def rotation(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        """RoPE over the whole head, plain; angles in fp32 whatever the weights are, or fp64 where the model is."""
        wide = torch.promote_types(dtype, torch.float32)
        # No buffer: casting the module to bfloat16 would cast the frequencies, too.
        exponents = torch.arange(0, self.config.head_dim, 2, device=positions.device, dtype=torch.float64)
        frequencies = self.config.rope_theta ** (-exponents / self.config.head_dim)
        angles = positions[..., None].to(wide) * frequencies.to(wide)
        angles = torch.cat((angles, angles), -1)[:, None]
        return Rotation(angles.cos().to(dtype), angles.sin().to(dtype))

    def _decoder(self) -> list[Layer]:
        return [layer for layer in self.layers if isinstance(layer, Layer)]


class ContextCache:
    """Keys and values of verified contexts for every layer, padded on the right, growing in place.

    The buffers double, so appending costs amortised O(tokens appended). Only verified tokens come in: nothing to crop.
    """

    def __init__(self, rows: int = 1) -> None:
        self.lengths = [0] * rows
        """[B] tokens of each row."""
        self._layers: list[KeyValue] = []

    def starts(self, device: torch.device) -> Tensor:
        """[B, 1] int64, the lengths."""
        return torch.tensor(self.lengths, device=device)[:, None]

    def append(self, new: Sequence[KeyValue], counts: Sequence[int]) -> None:
        """Add keys and values [B, g, s, D], one pair a layer, of which `counts` belong to each row.

        The rest is written, too, beyond the row's end, where nobody looks and the next tokens will overwrite it.
        """
        key = new[0].key
        self._reserve(new, max(self.lengths) + key.shape[2])
        rows = torch.arange(len(self.lengths), device=key.device)[:, None]
        places = self.starts(key.device) + torch.arange(key.shape[2], device=key.device)
        for buffers, pair in zip(self._layers, new, strict=True):
            for buffer, part in zip(buffers, pair, strict=True):
                buffer[rows, :, places] = part.transpose(1, 2)
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]

    def read(self) -> list[KeyValue]:
        """Views [B, g, longest row, D] of what is filled, one pair a layer."""
        return [KeyValue(*(t[:, :, : max(self.lengths)] for t in pair)) for pair in self._layers]

    def select(self, rows: Sequence[int]) -> None:
        """Go on with these rows only, in this order."""
        self.lengths = [self.lengths[row] for row in rows]
        self._layers = [KeyValue(*(t[list(rows)] for t in pair)) for pair in self._layers]

    def join(self, other: "ContextCache") -> None:
        """Take in the rows of `other` behind the present ones."""
        if not self.lengths:
            self.lengths, self._layers = other.lengths, other._layers
            return
        room = max(pair.key.shape[2] for pair in (self._layers[0], other._layers[0]))
        both = zip(self._layers, other._layers, strict=True)
        self._layers = [
            KeyValue(*(torch.cat([_with_room(t, room) for t in parts]) for parts in zip(*pairs, strict=True)))
            for pairs in both
        ]
        self.lengths = self.lengths + other.lengths

    def _reserve(self, like: Sequence[KeyValue], end: int) -> None:
        room = self._layers[0].key.shape[2] if self._layers else 0
        if end > room:
            grown = max(2 * room, end, 256)
            self._layers = [
                KeyValue(*(_with_room(t, grown) for t in pair))
                for pair in self._layers or [KeyValue(*(t[:, :, :0] for t in pair)) for pair in like]
            ]


def _with_room(values: Tensor, room: int) -> Tensor:
    """[B, g, room, D], zeros behind: they are masked, but must be finite."""
    return F.pad(values, (0, 0, 0, room - values.shape[2]))


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotate the pairs (i, i + D/2) of `x` [B, heads, tokens, D]."""
    first, second = x.chunk(2, -1)
    return x * rotation.cos + torch.cat((-second, first), -1) * rotation.sin


def embed_blocks(embedding: Tensor, anchor_tokens: Tensor, config: DrafterConfig, block_size: int) -> Tensor:
    """Embedded slots: the anchor's token, then mask tokens.

    Args:
        embedding: [V, H], the target's, frozen.
        anchor_tokens: [B, N] int64 token ids.
        config: names the mask token.
        block_size: K, at most the trained one.

    Returns:
        [B, N*K, H].
    """
    B, N = anchor_tokens.shape
    out = embedding[config.mask_token_id].repeat(B, N, block_size, 1)
    out[:, :, 0] = embedding[anchor_tokens]
    return out.flatten(1, 2)
