"""Things that propose the next tokens of a sequence: our drafter, and the n-gram model it is compared with."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dflash_core.drafter.model import ContextCache, Drafter, embed_blocks
from dflash_core.evaluation.ngram import NgramModel


@dataclass(frozen=True)
class Proposal:
    """K-1 proposed tokens and the distributions they were drawn from."""

    tokens: Tensor
    """int64 [K-1]."""
    probabilities: Tensor | None
    """[K-1, V]; None: the draft was certain of each token (a distribution of one)."""


class Draft(Protocol):
    """A source of proposals for one sequence at a time."""

    block_size: int
    """K: the anchor and K-1 proposals."""

    def begin(self) -> None:
        """Forget everything: a new sequence."""

    def observe(self, tokens: Tensor, features: Tensor) -> None:
        """Take in tokens [1, s] that the target has verified, with their features [1, s, L*H]."""

    def propose(self, anchor: int, generator: torch.Generator | None) -> Proposal:
        """Propose what follows `anchor`, the token after all observed ones; without a generator the likeliest."""


class DrafterDraft:
    """The trained drafter, with its cached context."""

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
            drafter: in evaluation, on the device and in the dtype of the others.
            embedding: [V, H], the target's.
            lm_head: [V, H], the target's.
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
        self._context = ContextCache()

    @torch.no_grad()
    def observe(self, tokens: Tensor, features: Tensor) -> None:
        del tokens
        self._drafter.extend(self._context, torch.zeros_like(features) if self._zero else features)

    @torch.no_grad()
    def propose(self, anchor: int, generator: torch.Generator | None) -> Proposal:
        anchors = torch.full((1, 1), anchor, device=self._embedding.device)
        inputs = embed_blocks(self._embedding, anchors, self._drafter.config, self.block_size)
        hidden = self._drafter.draft(self._context, inputs)
        logits = hidden[0, 1:] @ self._lm_head.t()
        if generator is None or self._temperature == 0:
            return Proposal(logits.argmax(-1), None)
        probabilities = torch.softmax(logits.float() / self._temperature, -1)
        return Proposal(torch.multinomial(probabilities, 1, generator=generator)[:, 0], probabilities)


class NgramDraft:
    """The n-gram model, greedily."""

    def __init__(self, model: NgramModel, block_size: int) -> None:
        self.block_size = block_size
        self._model = model
        self.begin()

    def begin(self) -> None:
        self._tokens: list[int] = []

    def observe(self, tokens: Tensor, features: Tensor) -> None:
        del features
        self._tokens += tokens[0].tolist()

    def propose(self, anchor: int, generator: torch.Generator | None) -> Proposal:
        del generator
        tail = [*self._tokens[-self._model.n :], anchor]
        return Proposal(torch.tensor(self._model.continuation(tail, self.block_size - 1)), None)
