"""Object key -> partition key is reversible, harmless to Dagster and harmless as a file name."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_core.storage.keys import SUFFIXES, object_key, partition_key

paths = st.builds(
    lambda stem, suffix: stem + suffix,
    st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
    | st.sampled_from(["../../x", "/abs", "a\\b", "nul\0", "a...b", "x.jsonl", "x.jsonl.gz", "", ".", "..", "~"]),
    st.sampled_from(SUFFIXES),
)


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
def test_what_is_no_completion_file_is_refused(key: str) -> None:
    with pytest.raises(ValueError, match="no file of completions"):
        partition_key(key, "prefix/")
