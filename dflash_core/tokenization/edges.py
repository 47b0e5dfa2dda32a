"""Where a text may be cut and its parts encoded apart: behind an added token, if this tokenizer does not look across.

Byte-level tokenizers do not (none of 1,400 adversarial completions differed); SentencePiece-style ones treat the
beginning of a text in their own way, so their rows are encoded whole.
"""

from dflash_core.tokenization.adversarial import AROUND, MAX_TOKENS
from dflash_core.tokenization.tokenizer import ChatTokenizer


def cuttable_tokens(tokenizer: ChatTokenizer) -> frozenset[str]:
    """The added tokens behind which a cut never changed an id; those in the template are tried first."""
    tokens = sorted(tokenizer.added, key=lambda token: (token not in tokenizer.template.text, token))
    return frozenset(token for token in tokens[:MAX_TOKENS] if token.strip() and _is_cuttable(tokenizer, token))


def _is_cuttable(tokenizer: ChatTokenizer, token: str) -> bool:
    def ids(text: str) -> list[int]:
        return tokenizer.reference.encode(text, add_special_tokens=False).ids

    return all(
        ids(before + token + after) == ids(before + token) + ids(after)
        for before in AROUND
        for after in (*AROUND[::-1], "\n\na", "  a")
    )
