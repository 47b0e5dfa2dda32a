"""Bytes of one source object -> numbered lines -> completions and rejects, in bounded memory whatever the bytes claim.

Every line yields at least one completion or one reject, in line order. Lines end at the byte `\\n` and nowhere else.
Compression is recognized by content. Decompression runs in small steps with a cap on the total, and a line beyond its
cap is skipped while only its number is kept, so neither a bomb nor an endless line costs more than a few megabytes.
"""

import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, TypeVar

import zstandard

from dflash_core.completions.completion import Completion, Rejected
from dflash_core.completions.normalize import normalize
from dflash_core.completions.parsing import parse_object
from dflash_core.errors import UnreadableFile
from dflash_core.records import Reject

Item = TypeVar("Item")
Line = tuple[int, bytes | None]
"""A line's number from 1 and its text without the line ending; None: it is longer than the cap."""

MAX_OBJECT_BYTES = 256 << 20
"""Largest source object that is read at all; a partition is one file, so larger ones are split."""
MAX_TEXT_BYTES = 1 << 30
"""Most bytes one object may decompress to."""
MAX_LINE_BYTES = 8 << 20
BLOCK_BYTES = 1 << 20
MAX_WHOLE_BYTES = 8 << 20
"""A plain file up to this size is split at once, which copies it once less."""
ZSTD_STEP_BYTES = 1 << 10
"""Four bytes of zstd can stand for 128 KiB, so one step yields 32 MiB at most."""
ZSTD_MAX_WINDOW_BYTES = 128 << 20

GZIP_MAGIC = b"\x1f\x8b"
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
ZSTD_SKIPPABLE = tuple(bytes([i, 0x2A, 0x4D, 0x18]) for i in range(0x50, 0x60))
"""Frames that hold no text; parallel compressors put one in front."""
BOM = b"\xef\xbb\xbf"


MAX_REJECTS = 100_000
"""Of one file: each is kept with its line and reason, and a few kilobytes can hold a billion blank lines."""


@dataclass
class CompletionFile:
    """The bytes of one source object. Iterate it once; then `lines_read` is the number of its lines.

    A line becomes its completions, or a `Reject` for the whole line; of several answers the empty ones become rejects.
    """

    body: bytes
    where: str
    """Names the object in errors."""
    turns: Literal["all", "last"] = "all"
    """Every completion of a line, or its last one."""
    lines_read: int = 0

    def __iter__(self) -> Iterator[Completion | Reject]:
        """Raises UnreadableFile if the compressed stream is broken or too long, or there are too many rejects."""
        return within_rejects(self._items(), self.where)

    def _items(self) -> Iterator[Completion | Reject]:
        for number, text in read_lines(self.body, self.where):
            self.lines_read += 1
            if text is None:
                yield overlong(number)
                continue
            try:
                completions = normalize(parse_object(text), number)
            except Rejected as rejected:
                yield Reject(line=number, reason=rejected.reason, detail=rejected.detail)
                continue
            full = []
            for completion in completions:
                if completion.is_empty:
                    answer = completion.messages[-1]
                    detail = "a thought and no answer" if answer.reasoning else "no text"
                    where = f"{detail} (message {len(completion.messages) - 1})"
                    yield Reject(line=number, reason="empty completion", detail=where)
                else:
                    full.append(completion)
            yield from full if self.turns == "all" else full[-1:]


def overlong(number: int) -> Reject:
    """The reject of a line beyond the cap."""
    return Reject(line=number, reason="line too long", detail=f"more than {MAX_LINE_BYTES} bytes")


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


def check_size(what: str, size: int) -> None:
    """Refuse an object of too many bytes before it is read, or written; `what` names it.

    Raises:
        UnreadableFile: it has more than MAX_OBJECT_BYTES.
    """
    if size > MAX_OBJECT_BYTES:
        raise UnreadableFile(f"{what} has {size} bytes, more than the {MAX_OBJECT_BYTES} of one file; split it")


def read_lines(
    body: bytes, where: str, *, max_text: int = MAX_TEXT_BYTES, max_line: int = MAX_LINE_BYTES
) -> Iterator[Line]:
    """All lines, from 1; a byte order mark at the start and one `\\r` at a line's end are left out.

    Raises:
        UnreadableFile: the compressed stream is damaged or truncated, or holds more than `max_text` bytes.
    """
    for number, text in _split(_blocks(body, where, max_text), max_line):
        if text is not None:
            if number == 1 and text.startswith(BOM):
                text = text[3:]
            if text.endswith(b"\r"):
                text = text[:-1]
        yield number, text


def _split(blocks: Iterator[bytes], max_line: int) -> Iterator[Line]:
    number, tail, overlong = 1, b"", False
    for block in blocks:
        *whole, rest = block.split(b"\n")
        for text in whole:
            if tail:
                text, tail = tail + text, b""
            yield number, None if overlong or len(text) > max_line else text
            number, overlong = number + 1, False
        if overlong:
            continue
        tail += rest
        if len(tail) > max_line:
            tail, overlong = b"", True
    if tail or overlong:
        yield number, None if overlong else tail


def _blocks(body: bytes, where: str, max_text: int) -> Iterator[bytes]:
    if body.startswith(GZIP_MAGIC):
        blocks = _gzip(body, where)
    elif body.startswith((ZSTD_MAGIC, *ZSTD_SKIPPABLE)):
        blocks = _zstd(body, where)
    else:
        step = len(body) if len(body) <= MAX_WHOLE_BYTES else BLOCK_BYTES
        blocks = (body[i : i + step] for i in range(0, len(body), step or 1))
    total = 0
    for block in blocks:
        total += len(block)
        if total > max_text:
            raise UnreadableFile(f"{where} holds more than {max_text} bytes of text; split it into smaller files")
        yield block


def _gzip(body: bytes, where: str) -> Iterator[bytes]:
    view, position = memoryview(body), 0
    try:
        while position < len(body):
            if body[position] == 0 and not body[position:].strip(b"\0"):
                return  # padding after the last member is allowed
            member = zlib.decompressobj(31)
            while not member.eof:
                pending = member.unconsumed_tail or view[position : position + BLOCK_BYTES]
                if not pending:
                    raise UnreadableFile(f"{where} is a truncated gzip stream; upload it again")
                if not member.unconsumed_tail:
                    position += len(pending)
                yield member.decompress(pending, BLOCK_BYTES)
            position -= len(member.unused_data)
    except zlib.error as error:
        raise UnreadableFile(f"{where} is a damaged gzip stream ({error}); upload it again") from None


def _zstd(body: bytes, where: str) -> Iterator[bytes]:
    view, position = memoryview(body), 0
    decompressor = zstandard.ZstdDecompressor(max_window_size=ZSTD_MAX_WINDOW_BYTES)
    try:
        while position < len(body):
            frame = decompressor.decompressobj()
            while not frame.eof:
                piece = view[position : position + ZSTD_STEP_BYTES]
                if not piece:
                    raise UnreadableFile(f"{where} is a truncated zstd stream; upload it again")
                position += len(piece)
                yield frame.decompress(piece)
            position -= len(frame.unused_data)
    except zstandard.ZstdError as error:
        raise UnreadableFile(f"{where} is a damaged zstd stream ({error}); upload it again") from None
