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
    """One input line."""

    row_id: str
    line: int
    """From 1."""
    messages: tuple[Message, ...]
    turns: tuple[int, ...]
    """Indices of the assistant messages that become rows; at least one, ascending."""
    tools: tuple[dict[str, Json], ...] = ()
    finish_reason: FinishReason | None = None
    """Of the last message; None: not recorded."""
    prompt_token_ids: tuple[int, ...] | None = None
    """The engine's own ids of the last turn: both given or neither."""
    completion_token_ids: tuple[int, ...] | None = None

    def turn_id(self, turn: int) -> str:
        """Row id of the turn at message index `turn`: the line's id, with `#n` if the line has several answers."""
        roles = [message.role for message in self.messages]
        return self.row_id if roles.count("assistant") == 1 else f"{self.row_id}#{roles[:turn].count('assistant')}"


class Refused(ValueError):
    """A row, or a turn of it, that is rejected. `reason` is one of few; `detail` says what exactly."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail[:200]
