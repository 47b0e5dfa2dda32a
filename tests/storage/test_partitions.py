"""A partition key is reversible and harmless to Dagster and as a file name; keys, patterns and ranges name files."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_core.errors import StorageError, UserError
from dflash_core.records import SourceFile
from dflash_core.storage.partitions import (
    SUFFIXES,
    WILD,
    list_sources,
    object_key,
    partition_key,
    select_files,
)
from dflash_core.storage.s3 import Store

paths = st.builds(
    lambda stem, suffix: stem + suffix,
    st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
    | st.sampled_from(["../../x", "/abs", "a\\b", "nul\0", "a...b", "x.jsonl", "x.jsonl.gz", "", ".", "..", "~"]),
    st.sampled_from(SUFFIXES),
)

FILES = [
    SourceFile(partition=key, key=key, uri=f"s3://b/{key}", etag="e", size=1)
    for key in ["a%2Fdeep", *(f"part-{number:02d}" for number in range(12))]
]


@given(paths)
def test_reversible_and_safe(path: str) -> None:
    partition = partition_key("prefix/" + path, "prefix/")
    assert object_key(partition, "prefix/") == "prefix/" + path
    assert re.fullmatch(r"[A-Za-z0-9._%-]+", partition)
    assert ".." not in partition
    assert partition != "."


@given(paths, paths)
def test_different_objects_have_different_keys(one: str, other: str) -> None:
    assert (partition_key(one, "") == partition_key(other, "")) == (one == other)


@pytest.mark.parametrize("key", ["other/a.jsonl", "prefix/a.json"])
def test_what_is_not_a_file_of_completions_is_refused(key: str) -> None:
    with pytest.raises(ValueError, match="not a file of completions"):
        partition_key(key, "prefix/")


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


def test_sources_are_the_completion_files_sorted(s3: Store) -> None:
    for name in ("b.jsonl", "a/x,y.jsonl.gz", "notes.txt"):
        s3.put(name, b"{}")
    assert [(f.partition, f.key) for f in list_sources(s3)] == [
        ("a%2Fx%2Cy.jsonl.gz", "derived/a/x,y.jsonl.gz"),
        ("b", "derived/b.jsonl"),
    ]


def test_an_empty_prefix_says_so(s3: Store) -> None:
    with pytest.raises(StorageError, match="holds no file of completions"):
        list_sources(s3)
