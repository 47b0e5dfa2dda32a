"""Keys, patterns and ranges name files; what names nothing is an error."""

import pytest

from dflash_core.errors import UserError
from dflash_core.records import SourceFile
from dflash_core.storage.keys import partition_key
from dflash_core.storage.selection import WILD, select_files

FILES = [
    SourceFile(partition=key, key=key, uri=f"s3://b/{key}", etag="e", size=1)
    for key in ["a%2Fdeep", *(f"part-{number:02d}" for number in range(12))]
]


@pytest.mark.parametrize(
    ("selectors", "expected"),
    [
        ([], [file.partition for file in FILES]),
        (["part-03"], ["part-03"]),
        (["part-0[12]", "a*"], ["a%2Fdeep", "part-01", "part-02"]),
        (["part-1?"], ["part-10", "part-11"]),
        (["part-03..part-05", "part-04"], ["part-03", "part-04", "part-05"]),
        (["part-10.."], []),
    ],
)
def test_selectors(selectors: list[str], expected: list[str]) -> None:
    if not expected:
        with pytest.raises(UserError, match=r"no source file for part-10\.\.; there are 13"):
            select_files(FILES, selectors)
    else:
        assert [file.partition for file in select_files(FILES, selectors)] == expected


def test_one_selector_without_a_file_is_enough_to_refuse() -> None:
    with pytest.raises(UserError, match=r"no prompt file for zzz, y\*"):
        select_files(FILES, ["part-03", "zzz", "y*"], "prompt file")


@pytest.mark.parametrize("name", ["a*b?.jsonl", "x[1]..y.jsonl", "....jsonl"])
def test_no_key_looks_like_a_pattern_or_a_range(name: str) -> None:
    key = partition_key(name, "")
    assert not WILD & set(key)
    assert ".." not in key
