"""The target's cache for several sequences at once: rows are chosen, joined and shortened, each by its own length.

The trade-off: rows are padded on the left to the longest, so any architecture of transformers reads them with its own
mask; in exchange shortening by unequal counts moves the keys. Attention layers keep all their keys (a window is the
mask's affair), so they can be shortened; states of linear attention cannot, and are kept from before instead.
Shapes: B rows, W tokens of the longest row, g key-value heads, D head dimension.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import DynamicCache
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionCacheLayerMixin,
)

STATES = ("conv_states", "recurrent_states")


@dataclass
class CachedRows:
    """What the target remembers of B sequences."""

    layers: list[Any]
    """Cache layers of transformers; keys and values [B, g, W, D], row i at the right end."""
    lengths: list[int]
    """[B] tokens of each row."""

    @classmethod
    def empty(cls, config: Any) -> "CachedRows":
        """One row without a token, for a model with this text config."""
        return cls([_croppable(layer) for layer in DynamicCache(config=config).layers], [0])

    @property
    def width(self) -> int:
        """W."""
        return max(self.lengths, default=0)

    @property
    def has_states(self) -> bool:
        """Whether a layer cannot be shortened."""
        return any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in self.layers)

    def as_cache(self) -> DynamicCache:
        """For the model's forward, which changes the layers in place."""
        cache = DynamicCache()
        cache.layers, cache.layer_class_to_replicate = self.layers, None
        return cache

    def mask(self, tokens: int, device: torch.device) -> Tensor | None:
        """[B, W + tokens]: 0 on padding; None where there is none."""
        if min(self.lengths) == self.width:
            return None
        padding = torch.tensor([self.width - length for length in self.lengths], device=device)
        return (torch.arange(self.width + tokens, device=device) >= padding[:, None]).long()

    def select(self, rows: Sequence[int]) -> "CachedRows":
        """Copies of these rows, in this order."""
        lengths = [self.lengths[row] for row in rows]
        cut = self.width - max(lengths, default=0)
        index = torch.tensor(list(rows), dtype=torch.int64)
        return CachedRows([_selected(layer, index, cut) for layer in self.layers], lengths)

    def join(self, other: "CachedRows") -> "CachedRows":
        """The rows of both, those of `other` behind."""
        if not self.lengths:
            return other
        width = max(self.width, other.width)
        pads = (width - self.width, width - other.width)
        pairs = zip(self.layers, other.layers, strict=True)
        return CachedRows([_joined(pair, pads) for pair in pairs], self.lengths + other.lengths)

    def shorten(self, counts: Sequence[int]) -> None:
        """Of the tokens that the layers hold beyond the lengths keep the first `counts` of each row.

        Only without `has_states`.
        """
        ends = [self.width + count for count in counts]
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]
        for layer in self.layers:
            if layer.is_initialized:
                layer.keys, layer.values = (_ending(t, ends, self.width) for t in (layer.keys, layer.values))


def _croppable(layer: Any) -> Any:
    """The same kind of layer, but one that forgets nothing beyond a window."""
    if isinstance(layer, LinearAttentionAndSlidingWindowAttentionLayer):
        return LinearAttentionAndFullAttentionLayer(layer.number_of_states)
    make_layer: Callable[[], Any] = DynamicLayer
    return make_layer() if isinstance(layer, DynamicSlidingWindowLayer) else layer


def _selected(layer: Any, rows: Tensor, cut: int) -> Any:
    """A copy with these rows and without the first `cut` columns."""
    copied: Any = copy.copy(layer)
    if isinstance(layer, DynamicLayer) and layer.is_initialized:
        rows = rows.to(copied.keys.device)
        copied.keys, copied.values = (t[rows, :, cut:] for t in (copied.keys, copied.values))
    for name in STATES if isinstance(layer, LinearAttentionCacheLayerMixin) else ():
        # The model writes into its states, and into the flags next to them.
        states = getattr(layer, name)
        setattr(copied, name, {i: None if t is None else t[rows.to(t.device)] for i, t in states.items()})
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        for name, value in vars(layer).items():
            if isinstance(value, dict) and name not in STATES:
                setattr(copied, name, dict(value))
    return copied


def _joined(pair: tuple[Any, Any], pads: tuple[int, int]) -> Any:
    joined = copy.copy(pair[0])
    if isinstance(joined, DynamicLayer) and joined.is_initialized:
        for name in ("keys", "values"):
            parts = [F.pad(getattr(layer, name), (0, 0, pad, 0)) for layer, pad in zip(pair, pads, strict=True)]
            setattr(joined, name, torch.cat(parts))
    for name in STATES if isinstance(joined, LinearAttentionCacheLayerMixin) else ():
        first, second = (getattr(layer, name) for layer in pair)
        setattr(joined, name, {i: None if t is None else torch.cat((t, second[i])) for i, t in first.items()})
    return joined


def _ending(values: Tensor, ends: Sequence[int], width: int) -> Tensor:
    """[B, g, width, D]: the `width` columns before each row's end; what comes before the first is padding."""
    if len(set(ends)) == 1 and ends[0] >= width:
        return values[:, :, ends[0] - width : ends[0]]
    first = torch.tensor(ends, device=values.device)[:, None] - width
    index = (first + torch.arange(width, device=values.device)).clamp(min=0)
    return values.gather(2, index[:, None, :, None].expand(-1, values.shape[1], -1, values.shape[3]))
