"""Bytes of one source object -> numbered lines, in bounded memory whatever the bytes claim to be.

Lines end at the byte `\\n` and nowhere else. Compression is recognized by content. Decompression runs in small steps
with a cap on the total, and a line beyond its cap is skipped while only its number is kept, so neither a bomb nor an
endless line costs more than a few megabytes.
"""

import zlib
from collections.abc import Iterator
from typing import NamedTuple

import zstandard

from dflash_core.errors import UnreadableFile

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


class Line(NamedTuple):
    """One line without its line ending; `text` is None when it is longer than the cap."""

    number: int
    text: bytes | None


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
    """All lines, from 1; a byte order mark at the start and one `\\r` at a line's end are no part of them.

    Raises:
        UnreadableFile: the compressed stream is damaged or truncated, or holds more than `max_text` bytes.
    """
    first = True
    for line in _split(_blocks(body, where, max_text), max_line):
        text = line.text
        if text is not None:
            if first and text.startswith(BOM):
                text = text[3:]
            if text.endswith(b"\r"):
                text = text[:-1]
        first = False
        yield Line(line.number, text)


def _split(blocks: Iterator[bytes], max_line: int) -> Iterator[Line]:
    number, tail, overlong = 1, b"", False
    for block in blocks:
        *whole, rest = block.split(b"\n")
        for text in whole:
            if tail:
                text, tail = tail + text, b""
            yield Line(number, None if overlong or len(text) > max_line else text)
            number, overlong = number + 1, False
        if overlong:
            continue
        tail += rest
        if len(tail) > max_line:
            tail, overlong = b"", True
    if tail or overlong:
        yield Line(number, None if overlong else tail)


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
