"""One line of bytes -> one JSON object, or the reason why not.

orjson is fast and strict (no NaN, no lone surrogates, no control characters, bounded depth); it tells neither which of
these it met nor that a key came twice. So its refusals are explained by the standard library's parser, and rows that
could hide a duplicate key or a number beyond 64 bits are parsed again by it.
"""

import json
import re
from typing import NoReturn

import orjson

from dflash_core.completions.completion import Json, Rejected

MAX_DEPTH = 100
BACKSLASH = ord("\\")
_KEY_END = re.compile(rb'"[ \t\r]*:')
_LONE_SURROGATE = re.compile(r"[\ud800-\udfff]")


def parse_object(text: bytes) -> dict[str, Json]:
    """Parse one line.

    Raises:
        Rejected: with the reason and, where it is known, the offset in the line.
    """
    if not text.strip():
        raise Rejected("blank line")
    try:
        row = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        return _explain(text, error)
    if type(row) is not dict:
        raise Rejected("not a JSON object", f"a {_kind(row)}")
    if _may_hide_a_key(text, count_keys(row)) or _has_structure(row):
        exact: dict[str, Json] = json.loads(text, object_pairs_hook=without_repeats, parse_constant=_refuse_constant)
        return exact
    return row


def _may_hide_a_key(text: bytes, keys: int) -> bool:
    """Whether the text may have more keys than were parsed from it, so that one came twice.

    Every key ends in a quote and a colon, white space between them or not. What else looks so (escaped within a text; a
    text that starts with a colon) only adds to the count, hence an equal number is proof.
    """
    if len(_KEY_END.findall(text)) == keys:
        return False
    return sum(not _is_escaped(text, end.start()) for end in _KEY_END.finditer(text)) != keys


def _is_escaped(text: bytes, quote: int) -> bool:
    first = quote
    while text[first - 1] == BACKSLASH:
        first -= 1
    return (quote - first) % 2 == 1


def count_keys(value: Json) -> int:
    """Keys in all objects of a value, level by level: no stack is deep enough for what may come.

    Raises:
        Rejected: more than `MAX_DEPTH` levels, which no later stage has to bear.
    """
    keys, depth, level = 0, 0, [value]
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise Rejected("nested too deeply", f"more than {MAX_DEPTH} levels")
        below: list[Json] = []
        for container in level:
            parts = container
            if type(container) is dict:
                keys += len(container)
                parts = container.values()
            below += [part for part in parts if type(part) is dict or type(part) is list]
        level = below
    return keys


def _has_structure(row: dict[str, Json]) -> bool:
    """Whether values other than text get rendered: orjson rounds integers beyond 64 bits."""
    if row.get("tools"):
        return True
    messages = row.get("messages") or row.get("conversations")
    return type(messages) is list and any(type(m) is dict and m.get("tool_calls") for m in messages)


def without_repeats(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    """The object of these pairs, for `json.loads`.

    Raises:
        Rejected: a key comes twice, and readers disagree on which one counts.
    """
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise Rejected("duplicate key", repr(next(n for n in names if names.count(n) > 1)))
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise Rejected("not a JSON number", name)


def _explain(text: bytes, problem: orjson.JSONDecodeError) -> NoReturn:
    if b"\0" in text:
        raise Rejected("NUL byte", f"at byte {text.index(0)}") from None
    try:
        decoded = text.decode("utf8")
    except UnicodeDecodeError as error:
        raise Rejected("invalid UTF-8", f"at byte {error.start}") from None
    try:
        row = json.loads(decoded, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise Rejected("invalid JSON", f"{error.msg} at character {error.pos}") from None
    except RecursionError:
        raise Rejected("nested too deeply") from None
    except ValueError as error:
        if isinstance(error, Rejected):
            raise
        raise Rejected("invalid JSON", str(error)) from None  # an integer of thousands of digits
    if "recursion" in str(problem).lower():
        raise Rejected("nested too deeply")
    if _LONE_SURROGATE.search(json.dumps(row, ensure_ascii=False)):
        raise Rejected("lone surrogate", "an escape that is half a character")
    raise Rejected("invalid JSON", str(problem))


def _kind(value: Json) -> str:
    names = {list: "list", str: "string", int: "number", float: "number", bool: "truth value"}
    return names.get(type(value), "null")
