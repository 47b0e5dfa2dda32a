"""One file of prompts -> prompts and rejects, in line order, and what identifies each prompt.

A prompt is identified by its content (messages and tools) and by how often that content occurred before in the file:
ids and line numbers may change, an answer stays with what was asked.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import orjson

from dflash_core.completions.completion import Json, Message, Rejected
from dflash_core.completions.normalize import conversation_of, message_of, row_id_of, tools_of
from dflash_core.completions.parsing import parse_object
from dflash_core.completions.read import overlong, read_lines, within_rejects
from dflash_core.records import Reject


class Prompt(NamedTuple):
    """One line of a file of prompts."""

    line: int
    """From 1."""
    row_id: str
    messages: tuple[Message, ...]
    """Ends with a message of the user or of a tool."""
    tools: tuple[dict[str, Json], ...]
    content_hash: str
    """Of messages, tools and the number of equal prompts before it."""


@dataclass
class PromptFile:
    """The bytes of one file of prompts; may be iterated again and again with equal results."""

    body: bytes
    where: str
    """Names the object in errors."""
    answers: Literal["reject", "replace"] = "reject"
    """What happens to a prompt that ends with an answer."""

    def __iter__(self) -> Iterator[Prompt | Reject]:
        """One of the two for every line.

        Raises:
            UnreadableFile: the compressed stream is broken or too long, or too many lines are rejected.
        """
        return within_rejects(self._items(), self.where)

    def _items(self) -> Iterator[Prompt | Reject]:
        seen: Counter[bytes] = Counter()
        for number, text in read_lines(self.body, self.where):
            if text is None:
                yield overlong(number)
                continue
            try:
                row = parse_object(text)
                messages, tools = self._messages(row), tools_of(row.get("tools"))
                row_id = row_id_of(row)
            except Rejected as rejected:
                yield Reject(line=number, reason=rejected.reason, detail=rejected.detail)
                continue
            content = hashlib.sha256(orjson.dumps([api_messages(messages), tools])).digest()
            occurrence = hashlib.sha256(content + str(seen[content]).encode()).hexdigest()
            seen[content] += 1
            yield Prompt(number, row_id, messages, tools, occurrence)

    def _messages(self, row: dict[str, Json]) -> tuple[Message, ...]:
        given = _raw_messages(row)
        messages = tuple(message_of(message, i, "stop") for i, message in enumerate(given))
        if messages[-1].role == "assistant":
            if self.answers == "reject":
                raise Rejected("prompt with an answer", "it ends with the role 'assistant'")
            messages = messages[:-1]
        if not messages or messages[-1].role not in ("user", "tool"):
            raise Rejected("no prompt", "nothing is asked")
        return messages


def api_messages(messages: tuple[Message, ...]) -> list[dict[str, Json]]:
    """The messages in the form of the chat completions API, which is also the form they are written in."""
    return [_api_message(message) for message in messages]


def _api_message(message: Message) -> dict[str, Json]:
    given: dict[str, Json] = {"role": message.role, "content": message.content, **dict(message.extra)}
    if message.reasoning is not None:
        given["reasoning_content"] = message.reasoning
    if message.tool_calls:
        calls = [(call, call["function"]) for call in message.tool_calls]
        given["tool_calls"] = [
            {
                "id": call.get("id", f"call_{number}"),
                "type": "function",
                "function": {
                    "name": function["name"],
                    "arguments": json.dumps(function["arguments"], ensure_ascii=False),
                },
            }
            for number, (call, function) in enumerate(calls)
        ]
    return given


def _raw_messages(row: dict[str, Json]) -> list[Json]:
    named = [row[key] for key in ("messages", "conversations", "prompt") if row.get(key) is not None]
    if len(named) != 1:
        raise Rejected(
            "no prompt" if not named else "ambiguous form", "one of messages, conversations, prompt is needed"
        )
    messages = [{"role": "user", "content": named[0]}] if type(named[0]) is str else named[0]
    return conversation_of(messages, row)
