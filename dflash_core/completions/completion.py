"""One normalized completion: what every accepted input form becomes, and the only thing later stages see."""

from typing import Any, Literal, NamedTuple

Role = Literal["system", "developer", "user", "assistant", "tool"]
FinishReason = Literal["stop", "length", "tool_calls"]
Spelling = Literal["reasoning_content", "reasoning", "inline"]
"""How a thought was written: in a field of that name, or between tags in the content."""
Json = Any
"""A value as JSON has it."""


class Message(NamedTuple):
    """One message; plain text only."""

    role: Role
    content: str
    reasoning: str | None = None
    """The thought, without its tags; None or non-empty."""
    tool_calls: tuple[dict[str, Json], ...] = ()
    """`{"type": "function", "function": {"name": str, "arguments": dict}}`, with the `id` where there is one."""
    extra: tuple[tuple[str, str], ...] = ()
    """`name` and `tool_call_id`, where given: templates may print them."""
    spelling: Spelling | None = None
    """How the thought was written: counted, and without any effect on the ids."""


class Completion(NamedTuple):
    """One answer and the conversation before it: what becomes one row. A line with several answers gives several."""

    row_id: str
    """The line's id, with `#n` for answer n (from 0) of a line with several."""
    line: int
    """From 1."""
    messages: tuple[Message, ...]
    """The answer last."""
    tools: tuple[dict[str, Json], ...] = ()
    finish_reason: FinishReason | None = None
    """Of the answer; None: not recorded."""
    prompt_token_ids: tuple[int, ...] | None = None
    """The engine's own ids: both given or neither."""
    completion_token_ids: tuple[int, ...] | None = None
    options: str = ""
    """The row's own template options, a JSON object; empty: it names none. They come before the recipe's."""

    @property
    def is_empty(self) -> bool:
        """Whether the answer holds neither text nor calls, nor a thought that the token limit cut."""
        answer = self.messages[-1]
        if (answer.content and not answer.content.isspace()) or answer.tool_calls:
            return False
        return not (self.finish_reason == "length" and answer.reasoning)


class Rejected(ValueError):
    """A row, or a turn of it, that is rejected. `reason` is one of few; `detail` says what exactly."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail[:200]
