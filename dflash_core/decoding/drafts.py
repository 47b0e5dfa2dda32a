"""Things that propose the next tokens of sequences: our drafter, what it is compared with, and nothing at all.

Shapes: B rows, s tokens, K block size, L captured layers, H hidden size, V vocabulary.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dflash_core.drafter.model import ContextCache, Drafter, embed_blocks


@dataclass(frozen=True)
class Proposal:
    """K-1 proposed tokens of one row or of B rows, and the distributions they were drawn from."""

    tokens: Tensor
    """int64 [(B,) K-1]."""
    probabilities: Tensor | None
    """[(B,) K-1, V]; None: the draft was certain of each token (a distribution of one)."""

    def row(self, index: int) -> "Proposal":
        """That of one of the rows."""
        return Proposal(self.tokens[index], None if self.probabilities is None else self.probabilities[index])


Generators = Sequence[torch.Generator | None]
"""[B] each row's source of randomness; None: take the likeliest."""


class Draft(Protocol):
    """A source of proposals for some sequences at a time."""

    block_size: int
    """K: the anchor and K-1 proposals."""

    def begin(self) -> None:
        """Forget every row."""

    def admit(self, tokens: Tensor, features: Tensor) -> None:
        """A new last row, whose prompt [1, s] the target has read, with its features [1, s, L*H]."""

    def observe(self, tokens: Tensor, features: Tensor, counts: Sequence[int]) -> None:
        """Take in the first `counts[b]` tokens of row b of [B, s], now verified, with their features [B, s, L*H]."""

    def propose(self, anchors: Sequence[int], generators: Generators) -> Proposal:
        """Propose what follows each row's anchor, the token after all observed ones."""

    def select(self, rows: Sequence[int]) -> None:
        """Go on with these rows only, in this order."""


class NoDraft:
    """Proposes nothing: the target alone, token by token."""

    block_size = 1

    def begin(self) -> None:
        """Nothing is remembered."""

    def admit(self, tokens: Tensor, features: Tensor) -> None:
        """Nothing is remembered."""

    def observe(self, tokens: Tensor, features: Tensor, counts: Sequence[int]) -> None:
        """Nothing is remembered."""

    def propose(self, anchors: Sequence[int], generators: Generators) -> Proposal:
        """No token."""
        del generators
        return Proposal(torch.empty(len(anchors), 0, dtype=torch.int64), None)

    def select(self, rows: Sequence[int]) -> None:
        """Nothing is remembered."""


class DrafterDraft:
    """The trained drafter, with its cached contexts."""

    def __init__(
        self,
        drafter: Drafter,
        embedding: Tensor,
        lm_head: Tensor,
        *,
        block_size: int | None = None,
        temperature: float = 0.0,
        zero_features: bool = False,
    ) -> None:
        """
        Args:
            drafter: in evaluation; features are brought to its device and dtype.
            embedding: [V, H], the target's, on the drafter's device.
            lm_head: [V, H], the target's, on the drafter's device.
            block_size: K, at most the trained one; None: the trained one.
            temperature: of the proposals where they are drawn.
            zero_features: hide the target's features, to see what they are worth.

        Raises:
            ValueError: the block is larger than the trained one, whose later slots were never trained.
        """
        self.block_size = block_size or drafter.config.block_size
        if self.block_size > drafter.config.block_size:
            raise ValueError(f"block size {self.block_size} exceeds the trained {drafter.config.block_size}")
        self._drafter, self._embedding, self._lm_head = drafter, embedding, lm_head
        self._temperature, self._zero = temperature, zero_features
        self.begin()

    def begin(self) -> None:
        self._context = ContextCache(0)

    @torch.no_grad()
    def admit(self, tokens: Tensor, features: Tensor) -> None:
        del tokens
        row = ContextCache()
        self._drafter.extend(row, self._seen(features))
        self._context.join(row)

    @torch.no_grad()
    def observe(self, tokens: Tensor, features: Tensor, counts: Sequence[int]) -> None:
        longest = max(counts)
        del tokens
        self._drafter.extend(self._context, self._seen(features[:, :longest]), counts)

    @torch.no_grad()
    def propose(self, anchors: Sequence[int], generators: Generators) -> Proposal:
        tokens = torch.tensor(list(anchors), device=self._embedding.device)[:, None]
        inputs = embed_blocks(self._embedding, tokens, self._drafter.config, self.block_size)
        hidden = self._drafter.draft(self._context, inputs.to(self._drafter.fc.weight.dtype))
        logits = hidden[:, 1:].to(self._lm_head.dtype) @ self._lm_head.t()
        if self._temperature == 0 or None in generators:
            return Proposal(logits.argmax(-1), None)
        probabilities = torch.softmax(logits.float() / self._temperature, -1)
        drawn = [torch.multinomial(p, 1, generator=g)[:, 0] for p, g in zip(probabilities, generators, strict=True)]
        return Proposal(torch.stack(drawn), probabilities)

    def select(self, rows: Sequence[int]) -> None:
        self._context.select(rows)

    def _seen(self, features: Tensor) -> Tensor:
        return (torch.zeros_like(features) if self._zero else features).to(self._drafter.fc.weight)


class NgramModel:
    """An n-gram model with backoff: the likeliest next token after the longest known context of at most n-1 tokens.

    What repetition of the text alone would win; the drafter has to beat it. Only the most frequent continuation of each
    context is kept, so drafting is a dictionary look-up; there are no probabilities, and a sampled target accepts it as
    a drafter that is always sure.
    """

    def __init__(self, n: int, rows: Iterable[NDArray[np.int32]]) -> None:
        """
        Args:
            n: order; 3 looks at two tokens.
            rows: token ids [tokens] of each document; none crosses into the next.

        Raises:
            ValueError: no tokens to count.
        """
        self.n = n
        documents = [row for row in rows if len(row)]
        if not documents:
            raise ValueError("an n-gram drafter needs at least one row to count")
        self._next: dict[tuple[int, ...], int] = {}
        for order in range(1, n + 1):
            windows = [np.lib.stride_tricks.sliding_window_view(d, order) for d in documents if len(d) >= order]
            if windows:
                self._next |= _likeliest(np.concatenate(windows))

    def predict(self, context: Sequence[int]) -> int:
        """The next token after `context`, whose last n-1 tokens count."""
        for length in range(min(self.n - 1, len(context)), 0, -1):
            token = self._next.get(tuple(context[-length:]))
            if token is not None:
                return token
        return self._next[()]

    def continuation(self, context: Sequence[int], count: int) -> list[int]:
        """The next `count` tokens, greedily."""
        tail = list(context[-(self.n - 1) :]) if self.n > 1 else []
        start = len(tail)
        for _ in range(count):
            tail.append(self.predict(tail))
        return tail[start:]


class NgramDraft:
    """The n-gram model, greedily."""

    def __init__(self, model: NgramModel, block_size: int) -> None:
        self.block_size = block_size
        self._model = model
        self.begin()

    def begin(self) -> None:
        self._rows: list[list[int]] = []

    def admit(self, tokens: Tensor, features: Tensor) -> None:
        del features
        self._rows.append(tokens[0].tolist())

    def observe(self, tokens: Tensor, features: Tensor, counts: Sequence[int]) -> None:
        del features
        for row, new, count in zip(self._rows, tokens.tolist(), counts, strict=True):
            row += new[:count]

    def propose(self, anchors: Sequence[int], generators: Generators) -> Proposal:
        del generators
        tails = [[*row[-self._model.n :], anchor] for row, anchor in zip(self._rows, anchors, strict=True)]
        return Proposal(torch.tensor([self._model.continuation(tail, self.block_size - 1) for tail in tails]), None)

    def select(self, rows: Sequence[int]) -> None:
        self._rows = [self._rows[row] for row in rows]


def _likeliest(grams: NDArray[np.int32]) -> dict[tuple[int, ...], int]:
    """Context -> most frequent last token (the smaller id of equals), from n-grams [count, n]."""
    ordered = grams[np.lexsort(grams.T[::-1])]
    first = _changes(ordered)
    grams, counts = ordered[first], np.diff(np.append(first, len(ordered)))
    contexts = grams[:, :-1]
    # Within a context, most frequent first; lexsort is stable, so equal counts stay in order of their ids.
    best = np.lexsort((-counts, *contexts.T[::-1]))
    winners = grams[best][_changes(contexts[best])]
    return {tuple(context): token for *context, token in winners.tolist()}


def _changes(rows: NDArray[np.int32]) -> NDArray[np.int64]:
    """Indices at which a row differs from the one before it."""
    differs = np.any(rows[1:] != rows[:-1], axis=1)
    return np.flatnonzero(np.append(True, differs))
