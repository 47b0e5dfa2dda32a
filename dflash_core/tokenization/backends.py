"""Text -> token ids in bulk. Hugging Face `tokenizers` is the reference; anything faster has to prove itself.

fastokens is some 50 times faster and gave equal ids wherever it was compared, but exactness outranks speed: it is used
only after it agreed with the reference on an adversarial set for this very tokenizer, and a share of the rows of every
file is compared again (`FileTokenizer`).
"""

import logging
import os
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from dflash_core.tokenization.adversarial import adversarial_texts
from dflash_core.tokenization.tokenizer import ChatTokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer

log = logging.getLogger(__name__)

Ids = NDArray[np.int32]
Offsets = NDArray[np.int64]


class Backend(Protocol):
    """Encodes many texts at once, without adding special tokens."""

    name: str

    def encode(self, texts: Sequence[str], *, special_as_text: bool = False) -> tuple[Ids, Offsets]:
        """All ids one after the other, and the n + 1 boundaries between the texts.

        Args:
            special_as_text: control tokens in the texts are ordinary text.
        """


class HuggingFaceBackend:
    """The reference."""

    name = "huggingface"

    def __init__(self, tokenizer: "Tokenizer") -> None:
        self._tokenizer = tokenizer

    def encode(self, texts: Sequence[str], *, special_as_text: bool = False) -> tuple[Ids, Offsets]:
        """See `Backend`."""
        self._tokenizer.encode_special_tokens = special_as_text
        try:
            found = [self._tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
        finally:
            self._tokenizer.encode_special_tokens = False
        offsets = np.fromiter(accumulate(map(len, found), initial=0), np.int64, len(found) + 1)
        return np.fromiter((i for ids in found for i in ids), np.int32, int(offsets[-1])), offsets


class FastokensBackend:
    """fastokens; one thread, since the pipeline runs one process a core."""

    name = "fastokens"

    def __init__(self, serialized: str) -> None:
        os.environ.setdefault("FASTOKENS_BPE_THREADS", "1")  # read once, at import; it ignores every other setting
        from fastokens import Tokenizer as FastTokenizer

        self._tokenizer = FastTokenizer.from_json_str(serialized)

    def encode(self, texts: Sequence[str], *, special_as_text: bool = False) -> tuple[Ids, Offsets]:
        """See `Backend`."""
        ids, offsets = self._tokenizer.encode_batch_flat(list(texts), split_special_tokens=special_as_text)
        return np.frombuffer(ids, "<i4"), np.frombuffer(offsets, "<u8").astype(np.int64)


def choose_backend(tokenizer: ChatTokenizer, choice: Literal["auto", "fastokens", "huggingface"]) -> Backend:
    """The fastest backend that is exact for this tokenizer; one log line says which and why."""
    reference = HuggingFaceBackend(tokenizer.reference)
    if choice == "huggingface":
        return reference
    try:
        fast = FastokensBackend(tokenizer.reference.to_str())
    except Exception as error:  # noqa: BLE001 - the library raises bare Exception for what it cannot load
        log.warning("tokenizing with huggingface: fastokens cannot load this tokenizer (%s)", error)
        return reference
    difference = first_difference(fast, reference, adversarial_texts(tokenizer.added))
    if difference is not None:
        log.warning("tokenizing with huggingface: fastokens differs from it on %r", difference[:80])
        return reference
    log.info("tokenizing with fastokens: equal to huggingface on the adversarial set for this tokenizer")
    return fast


def first_difference(backend: Backend, reference: Backend, texts: Sequence[str]) -> str | None:
    """The first text on which the two disagree, control tokens read as structure or as text."""
    for special_as_text in (False, True):
        a, a_offsets = backend.encode(texts, special_as_text=special_as_text)
        b, b_offsets = reference.encode(texts, special_as_text=special_as_text)
        if np.array_equal(a, b) and np.array_equal(a_offsets, b_offsets):
            continue
        for i, text in enumerate(texts):
            if not np.array_equal(a[a_offsets[i] : a_offsets[i + 1]], b[b_offsets[i] : b_offsets[i + 1]]):
                return text
    return None
