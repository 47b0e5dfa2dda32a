"""Partitions: one is one source file. Its key, the files there are, and how people name some of them.

A partition key is the object's path below the source prefix, without a plain `.jsonl`, percent-encoded to
`[A-Za-z0-9._%-]+`: commas, `...`, quotes, slashes and brackets break Dagster's partition language and UI, and an
encoded key is also a safe file name (never with `/`, never `.` or `..`).

Recipe, launchpad and command line select files by keys, patterns and ranges:

    part-007            one key
    part-0*             a pattern: * any text, ? one character
    part-007..part-031  all keys between two, both included, in sorted order

No key holds `*`, `?`, `[` or `..`, so the three cannot be confused.
"""

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Protocol, TypeVar
from urllib.parse import quote, unquote

from dflash_core.errors import StorageError, UserError
from dflash_core.records import SourceFile
from dflash_core.storage.s3 import Store

SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst")
WILD = frozenset("*?[")


def is_completions(object_key: str) -> bool:
    """Whether the object counts as a file of completions."""
    return object_key.endswith(SUFFIXES)


def partition_key(object_key: str, prefix: str) -> str:
    """Encode an object key below `prefix`; inverse of `object_key`.

    Raises:
        ValueError: the object is not below the prefix, or not a file of completions.
    """
    path = object_key.removeprefix(prefix)
    if not object_key.startswith(prefix) or not is_completions(path):
        raise ValueError(f"{object_key!r} is not a file of completions below {prefix!r}")
    stem = path.removesuffix(".jsonl")
    encoded = quote(path if stem.endswith(SUFFIXES) or not stem else stem, safe="")
    encoded = encoded.replace("~", "%7E")
    return encoded.replace(".", "%2E") if ".." in encoded or encoded == "." else encoded


def object_key(partition: str, prefix: str) -> str:
    """Decode a partition key to the object key below `prefix`."""
    path = unquote(partition)
    return prefix + (path if path.endswith(SUFFIXES) else path + ".jsonl")


def named_partition(name: str) -> str:
    """The partition that a person means: its key, or the path below the source prefix, with or without `.jsonl`."""
    if re.fullmatch(r"[A-Za-z0-9._%-]+", name) and not name.endswith(".jsonl"):
        return name
    return partition_key(name if is_completions(name) else f"{name}.jsonl", "")


def find_files(source: Store) -> list[SourceFile]:
    """Every JSONL file of a source, sorted by partition; maybe none."""
    files = [
        SourceFile(
            partition=partition_key(source.prefix + listed.key, source.prefix),
            key=source.prefix + listed.key,
            uri=source.uri(listed.key),
            etag=listed.etag,
            size=listed.size,
        )
        for listed in source.list()
        if is_completions(listed.key)
    ]
    return sorted(files, key=lambda file: file.partition)


def list_sources(source: Store) -> list[SourceFile]:
    """Every file of completions, sorted by partition.

    Raises:
        StorageError: the listing fails or finds no file of completions.
    """
    files = find_files(source)
    if not files:
        raise StorageError(
            f"{source.uri('')} holds no file of completions (*.jsonl, *.jsonl.gz, *.jsonl.zst); "
            "put some there or correct source.bucket and source.prefix in the recipe"
        )
    return files


class HasPartition(Protocol):
    """What is known of a file."""

    @property
    def partition(self) -> str:
        """Its key."""


AnyFile = TypeVar("AnyFile", bound=HasPartition)


def select_files(files: Sequence[AnyFile], selectors: Sequence[str], what: str = "source file") -> list[AnyFile]:
    """The files that at least one selector names; no selector: all.

    Raises:
        UserError: a selector names no file.
    """
    if not selectors:
        return list(files)
    keys = [file.partition for file in files]
    chosen: set[str] = set()
    unknown = []
    for selector in selectors:
        found = _matching(keys, selector)
        chosen |= found
        if not found:
            unknown.append(selector)
    if unknown:
        there = f"there are {len(keys)}, from {keys[0]} to {keys[-1]}" if keys else "there is none at all"
        raise UserError(
            f"no {what} for {', '.join(unknown[:5])}; {there}; give keys, patterns (part-0*) or ranges (FIRST..LAST)"
        )
    return [file for file in files if file.partition in chosen]


def _matching(keys: Sequence[str], selector: str) -> set[str]:
    first, dots, last = selector.partition("..")
    if dots:
        return {key for key in keys if first <= key <= last}
    if WILD & set(selector):
        return {key for key in keys if fnmatchcase(key, selector)}
    return {key for key in keys if key == selector}
