"""Bytes become numbered lines in bounded memory, whatever the bytes claim to be."""

import gzip
import tracemalloc
import zlib

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_core.completions.read import read_lines
from dflash_core.errors import UnreadableFile

TEXT = b'{"a": 1}\n\n{"b": "\xc3\xa9"}\r\nlast'


def texts(body: bytes, **caps: int) -> list[bytes | None]:
    return [text for _, text in read_lines(body, "s3://b/f", **caps)]


@pytest.mark.parametrize(
    "pack",
    [bytes, gzip.compress, zstandard.compress, lambda b: gzip.compress(b[:7]) + gzip.compress(b[7:]) + b"\0" * 9],
    ids=["plain", "gzip", "zstd", "gzip members and padding"],
)
def test_compression_is_known_by_content_and_changes_no_line(pack) -> None:
    assert texts(pack(TEXT)) == [b'{"a": 1}', b"", b'{"b": "\xc3\xa9"}', b"last"]


@pytest.mark.parametrize("place", range(3))
def test_zstd_frames_follow_each_other_and_some_hold_no_text(place: int) -> None:
    frames = [zstandard.compress(b"a\nb"), zstandard.compress(b"c\n")]
    assert texts(b"".join(frames)) == [b"a", b"bc"]
    frames.insert(place, b"\x5e\x2a\x4d\x18\x05\0\0\0hello")
    assert texts(b"".join(frames)) == [b"a", b"bc"]


@pytest.mark.parametrize(
    ("body", "lines"),
    [
        (b"", []),
        (b"\n", [b""]),
        (b"x", [b"x"]),
        (b"x\n", [b"x"]),
        (b"\xef\xbb\xbfx\ny\n", [b"x", b"y"]),
        (b"x\r\ny\r\n", [b"x", b"y"]),
        (b"a\x0bb\x85c\xe2\x80\xa8d\n", [b"a\x0bb\x85c\xe2\x80\xa8d"]),
        (b"x\n\xef\xbb\xbfy", [b"x", b"\xef\xbb\xbfy"]),
    ],
    ids=["zero bytes", "blank", "no final newline", "newline", "BOM", "CRLF", "other separators", "BOM inside"],
)
def test_lines_end_at_the_newline_byte_only(body: bytes, lines: list[bytes]) -> None:
    assert texts(body) == lines


@settings(max_examples=50, deadline=None)
@given(st.lists(st.binary(max_size=30).map(lambda b: b.replace(b"\n", b"").replace(b"\r", b"")), max_size=20))
def test_every_line_is_counted_once(lines: list[bytes]) -> None:
    body = b"".join(line + b"\n" for line in lines)
    if not body.startswith((b"\xef\xbb\xbf", b"\x1f\x8b", b"\x28\xb5\x2f\xfd")):
        found = list(read_lines(body, "f"))
        assert found == list(enumerate(lines, 1))


def test_an_overlong_line_is_skipped_and_the_next_one_unharmed() -> None:
    assert texts(b"ok\n" + b"x" * 5000 + b"\nnext\n", max_line=1000) == [b"ok", None, b"next"]
    assert texts(b"x" * (3 << 20) + b"\nnext", max_line=1 << 20) == [None, b"next"]
    assert texts(b"y\n" + b"x" * (3 << 20), max_line=1 << 20) == [b"y", None]


def test_a_line_of_gigabytes_costs_megabytes() -> None:
    compressor = zlib.compressobj(9, zlib.DEFLATED, 31)
    bomb = b"".join(compressor.compress(b"x" * (1 << 20)) for _ in range(256)) + compressor.compress(b"\nnext\n")
    bomb += compressor.flush()
    tracemalloc.start()
    assert texts(bomb) == [None, b"next"]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 48 << 20


@pytest.mark.parametrize("compress", [gzip.compress, zstandard.compress], ids=["gzip", "zstd"])
def test_a_bomb_stops_at_the_cap(compress) -> None:
    bomb = compress(b"a\n" * (8 << 20))
    assert len(bomb) < 100_000
    with pytest.raises(UnreadableFile, match="s3://b/f holds more than 1000000 bytes"):
        texts(bomb, max_text=1_000_000)


@pytest.mark.parametrize(
    "compress",
    [gzip.compress, lambda b: zstandard.ZstdCompressor(write_checksum=True).compress(b)],
    ids=["gzip", "zstd"],
)
def test_a_truncated_or_damaged_stream_fails_the_file(compress) -> None:
    whole = compress(bytes(range(256)) * 400)
    with pytest.raises(UnreadableFile, match="truncated"):
        texts(whole[:-3])
    with pytest.raises(UnreadableFile, match=r"truncated|damaged"):
        texts(whole[: len(whole) // 2])
    with pytest.raises(UnreadableFile, match="damaged"):
        texts(whole[:20] + b"\xff\xff\xff\xff" + whole[24:])
