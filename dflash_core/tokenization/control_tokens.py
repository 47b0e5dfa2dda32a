"""Control tokens that a message spells are text, never structure.

They travel through the template as private characters, so that whatever control token a render holds was printed by
the template, and come back as ordinary text. Added tokens that are not control tokens (tool-call tags, say) stay what
engines take them for, since decoding prints them as the model wrote them; a row with either kind in its text is
flagged.
"""

import re
from collections.abc import Iterable, Mapping, Sequence

from dflash_core.completions.completion import Json, Message, Rejected
from dflash_core.tokenization.tokenizer import ChatTokenizer

PRIVATE_BASE = 0x10F000
"""The far end of private use, where no icon font lives: one character for each control token."""


class ControlTokens:
    """The added tokens of one tokenizer, as found in texts."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self.added = _alternation(tokenizer.added)
        """Matches any added token; None if the tokenizer has none."""
        self._special = _alternation(tokenizer.special)
        self._private = {token: chr(PRIVATE_BASE + i) for i, token in enumerate(sorted(tokenizer.special))}
        self._spelled = {private: token for token, private in self._private.items()}
        self._privates = _alternation(self._spelled)

    def protect(
        self, messages: tuple[Message, ...], tools: tuple[Json, ...]
    ) -> tuple[tuple[Message, ...], tuple[Json, ...]]:
        """Hold control tokens out of all recorded text; the very same objects if there are none."""
        values = (*messages, *tools)
        if self._special is None or not any(_mentions(self._special, value) for value in values):
            return messages, tools
        if self._privates is not None and any(_mentions(self._privates, value) for value in values):
            raise Rejected("private characters", f"control tokens and U+{PRIVATE_BASE:X}.. in one conversation")
        protected = tuple(Message(*(_hold_out(part, self._special, self._private) for part in m)) for m in messages)
        return protected, tuple(_hold_out(tool, self._special, self._private) for tool in tools)

    def is_spelled(self, messages: Sequence[Message], recorded: Sequence[Message], full: str) -> bool:
        """Whether an added token is spelled in recorded text that the template printed."""
        return self.added is not None and any(
            _mentions(self.added, original) and (text.strip() in full)
            for message, before in zip(messages, recorded, strict=True)
            for text, original in _texts(message, before)
        )

    def spell(self, text: str) -> str:
        """Private characters back to the control tokens they stand for."""
        return "".join(self._spelled.get(character, character) for character in text)

    def is_protected(self, text: str) -> bool:
        """Whether a text of a protected row holds control tokens that are content."""
        return not text.isascii() and any(character in text for character in self._spelled)

    def split_structure(self, text: str) -> list[str]:
        """Cut the text at every control token that is structure; odd pieces are those tokens."""
        return self._special.split(text) if self._special else [text]


def _alternation(tokens: Iterable[str]) -> re.Pattern[str] | None:
    ordered = sorted((t for t in tokens if t.strip()), key=len, reverse=True)
    return re.compile("(" + "|".join(map(re.escape, ordered)) + ")") if ordered else None


def _texts(message: Message, recorded: Message) -> list[tuple[str, Json]]:
    """(as rendered, as recorded) of what a message holds; tool calls are printed in a form of the template's own."""
    calls: list[tuple[str, Json]] = [("", recorded.tool_calls)] if recorded.tool_calls else []
    return [(message.content, recorded.content), (message.reasoning or "", recorded.reasoning), *calls]


def _mentions(pattern: re.Pattern[str], value: Json) -> bool:
    """Whether any text in the value holds a token."""
    if isinstance(value, str):
        return pattern.search(value) is not None
    if isinstance(value, dict):
        return any(_mentions(pattern, part) for item in value.items() for part in item)
    return isinstance(value, (list, tuple)) and any(_mentions(pattern, part) for part in value)


def _hold_out(value: Json, pattern: re.Pattern[str], private: Mapping[str, str]) -> Json:
    if isinstance(value, str):
        return pattern.sub(lambda match: private[match.group()], value)
    if isinstance(value, dict):
        return {_hold_out(k, pattern, private): _hold_out(v, pattern, private) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_hold_out(part, pattern, private) for part in value)
    return value
