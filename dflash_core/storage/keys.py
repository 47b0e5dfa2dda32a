"""Object key <-> partition key.

A partition key is the object's path below the source prefix, without a plain `.jsonl`, percent-encoded to
`[A-Za-z0-9._%-]+`: commas, `...`, quotes, slashes and brackets break Dagster's partition language and UI, and an
encoded key is also a safe file name (no `/`, never `.` or `..`).
"""

import re
from urllib.parse import quote, unquote

SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst")


def is_completions(object_key: str) -> bool:
    """Whether the object counts as a file of completions."""
    return object_key.endswith(SUFFIXES)


def partition_key(object_key: str, prefix: str) -> str:
    """Encode an object key below `prefix`; inverse of `object_key`.

    Raises:
        ValueError: the object does not lie below the prefix or is no file of completions.
    """
    path = object_key.removeprefix(prefix)
    if not object_key.startswith(prefix) or not is_completions(path):
        raise ValueError(f"{object_key!r} is no file of completions below {prefix!r}")
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
