"""Text -> token ids in bulk. Hugging Face `tokenizers` is the reference; anything faster has to prove itself."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

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


class HuggingFace:
    """The reference."""

    name = "huggingface"

    def __init__(self, tokenizer: Tokenizer) -> None:
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
