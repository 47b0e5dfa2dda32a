"""Which files: keys, patterns and ranges, as recipe, launchpad and command line write them.

    part-007            one key
    part-0*             a pattern: * any text, ? one character
    part-007..part-031  all keys between two, both included, in sorted order

No key holds `*`, `?`, `[` or `..` (keys are percent-encoded), so the three cannot be confused.
"""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Protocol, TypeVar

from dflash_core.errors import UserError

WILD = frozenset("*?[")


class HasPartition(Protocol):
    """What is known of a file."""

    @property
    def partition(self) -> str:
        """Its key."""


AnyFile = TypeVar("AnyFile", bound=HasPartition)


def select_files(sources: Sequence[AnyFile], selectors: Sequence[str], what: str = "source file") -> list[AnyFile]:
    """The files that at least one selector names; none given: all.

    Raises:
        UserError: a selector names no file.
    """
    if not selectors:
        return list(sources)
    keys = [source.partition for source in sources]
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
    return [source for source in sources if source.partition in chosen]


def _matching(keys: Sequence[str], selector: str) -> set[str]:
    first, dots, last = selector.partition("..")
    if dots:
        return {key for key in keys if first <= key <= last}
    if WILD & set(selector):
        return {key for key in keys if fnmatchcase(key, selector)}
    return {key for key in keys if key == selector}
