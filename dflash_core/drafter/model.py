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

from dflash_core.drafter.config import DrafterConfig
from dflash_core.drafter.visibility import Attention, Blocks, attention


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

    def extend(self, cache: "ContextCache", features: Tensor) -> None:
        """Append the features [1, s, L*H] of the next s verified tokens to the cache."""
        projected = self.hidden_norm(self.fc(features))
        positions = cache.length + torch.arange(features.shape[1], device=features.device)
        rotation = self.rotation(positions[None], projected.dtype)
        cache.append([layer.self_attn.key_value(projected, rotation) for layer in self._decoder()])

    def draft(self, cache: "ContextCache", block_inputs: Tensor) -> Tensor:
        """One block right after the cached context; the cache is only read.

        Args:
            cache: the context, `length` tokens: the anchor's position.
            block_inputs: [1, K, H].

        Returns:
            Normed hidden states [1, K, H].
        """
        device, (S, K) = block_inputs.device, (cache.length, block_inputs.shape[1])
        at = torch.full((1, 1), S, device=device)
        attend = attention(Blocks(at, at * 0, at + K, at >= 0), (S, K), self.windows)
        rotation = self.rotation(S + torch.arange(K, device=device)[None], block_inputs.dtype)
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
    """Keys and values of the verified context for every layer, growing in place.

    The buffers double, so appending costs amortised O(tokens appended). Only verified tokens come in: nothing to crop.
    """

    def __init__(self) -> None:
        self.length = 0
        self._room = 0
        self._layers: list[KeyValue] = []

    def append(self, new: Sequence[KeyValue]) -> None:
        """Add the keys and values of the next tokens, one pair a layer."""
        end = self.length + new[0].key.shape[2]
        if end > self._room:
            self._room = max(2 * self._room, end, 256)
            old = self.read() if self.length else None
            self._layers = [KeyValue(*(self._grown(t) for t in pair)) for pair in new]
            if old is not None:
                for buffers, filled in zip(self._layers, old, strict=True):
                    for buffer, part in zip(buffers, filled, strict=True):
                        buffer[:, :, : self.length] = part
        for buffers, pair in zip(self._layers, new, strict=True):
            for buffer, part in zip(buffers, pair, strict=True):
                buffer[:, :, self.length : end] = part
        self.length = end

    def read(self) -> list[KeyValue]:
        """Views of what is filled, one pair a layer."""
        return [KeyValue(*(t[:, :, : self.length] for t in pair)) for pair in self._layers]

    def _grown(self, like: Tensor) -> Tensor:
        return like.new_empty((like.shape[0], like.shape[1], self._room, like.shape[3]))


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
