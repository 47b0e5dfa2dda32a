"""Anchors: where blocks start, drawn per document and epoch from (seed, epoch, row id) alone.

The trade-off: nothing is remembered between steps, so any worker at any time draws the same anchors; the price is one
keyed stream of 8 bytes per supervised token. Raw words of the bit generator are used, not a Generator's methods, whose
streams may change between numpy versions.
"""

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from dflash_core.drafter.attention import Blocks


class DocumentAnchors(NamedTuple):
    """One document's place in its row and the anchors drawn for it."""

    start: int
    """Index of its first token in the row."""
    end: int
    """One past its last."""
    anchors: NDArray[np.int64]
    """Sorted, counted from the document's first token."""


def eligible_anchors(loss_mask: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Tokens that may be anchors: supervised, and the next one too (else a block could have nothing to predict).

    Args:
        loss_mask: bool [tokens] of one document.
    """
    return np.flatnonzero(loss_mask[:-1] & loss_mask[1:])


def draw_anchors(loss_mask: NDArray[np.bool_], n: int, *, seed: int, epoch: int, row_id: str) -> NDArray[np.int64]:
    """Draw at most `n` anchors without replacement, sorted.

    Args:
        loss_mask: bool [tokens] of one document.
        n: anchors wanted; fewer come back where fewer tokens are eligible.
        seed: the recipe's.
        epoch: from 0.
        row_id: the document's own id, so that packing and worker count do not matter.
    """
    eligible = eligible_anchors(loss_mask)
    if len(eligible) <= n:
        return eligible
    digest = hashlib.blake2b(f"anchors\0{seed}\0{epoch}\0{row_id}".encode(), digest_size=16).digest()
    words = np.random.Philox(key=int.from_bytes(digest, "little")).random_raw(len(eligible))
    return eligible[np.sort(np.argsort(words, kind="stable")[:n])]


def stack_blocks(rows: Sequence[Sequence[DocumentAnchors]], least: int = 1) -> Blocks:
    """The blocks of a batch on the CPU; rows with fewer are filled up with padding blocks at the end.

    Args:
        rows: for each row its documents in order.
        least: blocks of a row, padding included.
    """
    n = max([least, *(sum(len(d.anchors) for d in documents) for documents in rows)])
    table = np.zeros((3, len(rows), n), np.int64)
    valid = np.zeros((len(rows), n), np.bool_)
    for b, documents in enumerate(rows):
        at = 0
        for document in documents:
            to = at + len(document.anchors)
            table[0, b, at:to] = document.anchors + document.start
            table[1, b, at:to] = document.start
            table[2, b, at:to] = document.end
            valid[b, at:to] = True
            at = to
    anchor, start, end = torch.from_numpy(table)
    return Blocks(anchor, start, end, torch.from_numpy(valid))
