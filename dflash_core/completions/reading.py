"""One source object -> its completions and rejects, in line order. Every line yields at least one of the two."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from dflash_core.completions.lines import MAX_LINE_BYTES, read_lines
from dflash_core.completions.normalize import normalize
from dflash_core.completions.parsing import parse_object
from dflash_core.completions.record import Completion, Refused
from dflash_core.errors import UnreadableFile
from dflash_core.records import Reject

Item = TypeVar("Item")
MAX_REJECTS = 100_000
"""Of one file: each is kept with its line and reason, and a few kilobytes can hold a billion blank lines."""


@dataclass
class CompletionFile:
    """The bytes of one source object. Iterate it once; then `lines_read` is the number of its lines.

    A line becomes one `Completion`, or a `Reject` for the whole line; a completion of several answers of which one is
    empty becomes both.
    """

    body: bytes
    where: str
    """Names the object in errors."""
    lines_read: int = 0

    def __iter__(self) -> Iterator[Completion | Reject]:
        """Raises UnreadableFile if the compressed stream is broken or too long, or there are too many rejects."""
        return within_rejects(self._items(), self.where)

    def _items(self) -> Iterator[Completion | Reject]:
        for line in read_lines(self.body, self.where):
            self.lines_read += 1
            if line.text is None:
                yield Reject(line=line.number, reason="line too long", detail=f"more than {MAX_LINE_BYTES} bytes")
                continue
            try:
                completion = normalize(parse_object(line.text), line.number)
            except Refused as refused:
                yield Reject(line=line.number, reason=refused.reason, detail=refused.detail)
                continue
            yield from without_empty_turns(completion)


def within_rejects(items: Iterable[Item | Reject], where: str) -> Iterator[Item | Reject]:
    """The items of a file as they come, as long as not too many of them are rejects.

    Raises:
        UnreadableFile: more than MAX_REJECTS are.
    """
    rejected = 0
    for item in items:
        if isinstance(item, Reject):
            rejected += 1
            if rejected > MAX_REJECTS:
                raise UnreadableFile(
                    f"{where}: more than {MAX_REJECTS:,} of its lines are rejected, the last at line {item.line} "
                    f'("{item.reason}"); correct the file or split it'
                )
        yield item


def without_empty_turns(completion: Completion) -> Iterator[Completion | Reject]:
    """Reject the answers that hold nothing; the rest of the conversation stays as it was."""
    last = len(completion.messages) - 1
    full = []
    for turn in completion.turns:
        message = completion.messages[turn]
        finish_reason = completion.finish_reason if turn == last else "stop"
        cut_in_thought = finish_reason == "length" and message.reasoning
        if (message.content and not message.content.isspace()) or message.tool_calls or cut_in_thought:
            full.append(turn)
        else:
            detail = "a thought and no answer" if message.reasoning else "no text"
            yield Reject(line=completion.line, reason="empty completion", detail=f"{detail} (message {turn})")
    if full:
        yield completion if len(full) == len(completion.turns) else completion._replace(turns=tuple(full))
