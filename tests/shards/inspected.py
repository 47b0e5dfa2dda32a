"""A row as `inspect_row` gives it, whose text is out to harm whoever shows it."""

from pathlib import Path

from tokenizers import Tokenizer

from dflash_core.shards.inspect import InspectedRow, pieces_of

TOKENIZER = Tokenizer.from_file(str(Path(__file__).resolve().parents[2] / "demo/target/tokenizer.json"))
PROMPT = "<|im_start|>user\nHow many <b>apples</b>\x1b[31m?<|im_end|>\n<|im_start|>assistant\n"
ANSWER = (
    "<think>\nLet us count.\n</think>\n\n"
    + "Four and four make eight, and eight and one make nine. " * 3
    + "Nine.<|im_end|>"
)


def hostile_row(dropped: str | None = None) -> InspectedRow:
    """Prompt and supervised answer; `dropped`: why it is in no shard."""
    prompt, answer = (TOKENIZER.encode(text, add_special_tokens=False).ids for text in (PROMPT, ANSWER))
    mask = [False] * len(prompt) + [True] * len(answer)
    pieces = tuple(pieces_of(TOKENIZER, [*prompt, *answer], mask))
    return InspectedRow("part%20one", "q:1 <b>", 1, "stop", ("thought",), pieces, dropped)
