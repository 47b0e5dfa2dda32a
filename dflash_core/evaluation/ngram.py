"""An n-gram drafter with backoff: what repetition of the text alone would win. The drafter has to beat it.

The trade-off: only the most frequent continuation of each context is kept, so drafting is a dictionary look-up; there
are no probabilities, and a sampled target accepts it as a drafter that is always sure.
"""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray


class NgramModel:
    """The likeliest next token after the longest known context of at most n-1 tokens."""

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
