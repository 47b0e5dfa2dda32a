"""One short name for everything that decides ids and masks, and for nothing else.

A path, a backend (all of them give equal ids, or are not used), the number of workers or an output folder does not
change it.
"""

import hashlib
import json

from dflash_core import TOKENIZATION_VERSION
from dflash_core.recipe import Recipe
from dflash_core.tokenization.tokenizer import read_tokenizer_files


def fingerprint(recipe: Recipe) -> str:
    """16 hexadecimal digits.

    Raises:
        RecipeError: the tokenizer or its chat template cannot be read.
    """
    return fingerprint_of(recipe, read_tokenizer_files(recipe).content_hash)


def fingerprint_of(recipe: Recipe, tokenizer_hash: str) -> str:
    """The same where the tokenizer is loaded already."""
    rules = recipe.tokenization
    parts = {
        "code": TOKENIZATION_VERSION,
        "tokenizer": tokenizer_hash,
        "options": rules.template_options,
        "max_length": rules.max_length,
        "truncation": rules.truncation,
        "turns": rules.turns,
        "truncated_thinking": rules.truncated_thinking,
        "supervise_empty_thought": rules.supervise_empty_thought,
        "repeats": rules.repeats,
        "min_supervised_tokens": recipe.min_supervised_tokens,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]
