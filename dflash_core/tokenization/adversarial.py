"""Texts on which tokenizers disagree, if they do: the set that a fast backend and a cut text have to pass.

Made, not stored: hand-picked corners, their combinations around the tokenizer's own added tokens, and a seeded walk
through the planes of Unicode.
"""

import random
from collections.abc import Iterable
from itertools import pairwise

CORNERS = (
    "",
    " ",
    "  ",
    "\n",
    "\n\n",
    "\n\n\n",
    "\r\n",
    "\t\t",
    " \n \n",
    "\u00a0",
    "\u3000x",
    "\u2028",
    "\x00",
    "\x1c\x85",
    "\ufeff",
    "\ufffd",
    "\u200b\u200d",
    "a",
    " a",
    "a ",
    "Hello world",
    "  leading",
    "trailing  ",
    "don't can't I'LL we've it's 'S 'llx",
    "don\u2019t",
    "1",
    "12345678901234567890",
    "3.14159e-10, 1,000,000",
    "\u0663\u0664\u0665 \u0967\u0968",
    "\u2460\u00bd\u2167",
    "camelCase snake_case kebab-case UPPER",
    "def f(x):\n    return x  # ok\n\n\nclass A:\n\tpass\n",
    "{}[]()<>|\\/~`!@#$%^&*_+-=;:'\",.?",
    "!!!???...---___",
    "<|", "|>", "<|im", "<think", "think>", "</", "<<48/2=24>>24",
    "e\u0301 \u00e9 \u1e69 s\u0323\u0307 \ufb01 \u212b",
    "\u0928\u092e\u0938\u094d\u0924\u0947 \u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35",
    "\u4f60\u597d\uff0c\u4e16\u754c\u3002\u3053\u3093\u306b\u3061\u306f\uc548\ub155",
    "\u0645\u0631\u062d\u0628\u0627 \u05e9\u05dc\u05d5\u05dd",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea \u2764\ufe0f \U0001f44d\U0001f3fd",
    "\U00020000\U0001d400\U000e0041\U000f0000\U0010ffff",
    "\\(a^2 + b^2 = c^2\\) \\[\\int_0^1 x\\,dx\\]",
    "a" * 300,
    " " * 150 + "x",
    "\n" * 70,
    "ab" * 200,
    "\u00e4\u00f6\u00fc\u00df \u0130i\u0131I \u01c5",
    "https://example.org/a?b=c&d=%20#e",
    "x\u0300\u0301\u0302\u0303",
    "-\n- \n-  x",
    "' s 't \u2019s",
)  # fmt: skip
AROUND = ("", " ", "\n", "\n\n", "a", "a ", " a", "\u00e9", "1", ".", "\u4f60")
RANGES = (
    (0x20, 0x7E), (0xA0, 0x24F), (0x300, 0x36F), (0x370, 0x52F), (0x590, 0x6FF), (0x900, 0xDFF), (0xE00, 0xEFF),
    (0x1E00, 0x206F), (0x2070, 0x2BFF), (0x3040, 0x30FF), (0x4E00, 0x9FFF), (0xAC00, 0xD7A3), (0xFB00, 0xFEFF),
    (0xFF00, 0xFFEF), (0x1D400, 0x1D7FF), (0x1F300, 0x1FAFF), (0x20000, 0x2A6DF),
)  # fmt: skip
MAX_TOKENS = 64


def adversarial_texts(added: Iterable[str], count: int = 300) -> list[str]:
    """The set for a tokenizer with these added tokens; equal for equal tokens."""
    tokens = sorted(added)[:MAX_TOKENS]
    around = [f"{a}{token}{b}" for token in tokens for a, b in zip(AROUND, AROUND[::-1], strict=True)]
    pairs = [a + b for a, b in pairwise(tokens)]
    return [*CORNERS, *around, *pairs, *_walk(count)]


def _walk(count: int) -> list[str]:
    rng = random.Random(20240917)
    texts = []
    for _ in range(count):
        pieces = []
        for _ in range(rng.randint(1, 30)):
            low, high = rng.choice(RANGES)
            word = "".join(chr(rng.randint(low, high)) for _ in range(rng.randint(1, 6)))
            pieces.append(rng.choice(("", " ", " ", "\n", "  ", "\t", ".", "'")) + word)
        texts.append("".join(pieces))
    return texts
