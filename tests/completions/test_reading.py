"""Every line becomes a completion or a reject with its number and a reason; the next line is never harmed."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_core.completions.completion import Completion, Rejected
from dflash_core.completions.parsing import parse_object
from dflash_core.completions.read import CompletionFile
from dflash_core.records import Reject

GOOD = b'{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}'


def read(body: bytes) -> tuple[list[Completion], list[Reject], int]:
    file = CompletionFile(body, "s3://b/f")
    items = list(file)
    good = [item for item in items if isinstance(item, Completion)]
    return good, [item for item in items if isinstance(item, Reject)], file.lines_read


def answer(content: object, **more: object) -> bytes:
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": content}]
    return json.dumps({"messages": messages, **more}).encode()


NESTED = GOOD[:-1] + b', "x": ' + b"[" * 5000 + b"]" * 5000 + b"}"
MALFORMED = {
    "blank line": (b"   ", "blank line"),
    "cut in the middle": (GOOD[:40], "invalid JSON"),
    "two objects": (GOOD + GOOD, "invalid JSON"),
    "raw NUL": (GOOD.replace(b'"q"', b'"q\0"'), "NUL byte"),
    "bad UTF-8": (GOOD.replace(b'"q"', b'"\xff\xfe"'), "invalid UTF-8"),
    "encoded surrogate": (GOOD.replace(b'"q"', b'"\xed\xa0\x80"'), "invalid UTF-8"),
    "lone surrogate": (GOOD.replace(b'"q"', b'"\\ud83d"'), "lone surrogate"),
    "NaN": (GOOD[:-1] + b', "score": NaN}', "not a JSON number"),
    "Infinity": (GOOD[:-1] + b', "score": -Infinity}', "not a JSON number"),
    "duplicate key": (GOOD[:-1] + b', "messages": []}', "duplicate key"),
    "duplicate key in a message": (GOOD.replace(b'"content": "a"', b'"content": "a", "content": "b"'), "duplicate key"),
    "duplicate key with a space": (GOOD[:-1] + b', "messages" : []}', "duplicate key"),
    "duplicate key with a tab": (GOOD[:-1] + b', "x"\t: 1, "x" :2}', "duplicate key"),
    "duplicate key spelt with an escape": (GOOD[:-1] + b', "\\u006dessages": []}', "duplicate key"),
    "duplicate key beside an escaped one": (GOOD[:-1] + b', "a\\\\": 1, "x": 1, "x": 2}', "duplicate key"),
    "duplicate key hidden by a text with a key": (
        GOOD.replace(b'"a"', b'"say \\"k\\": 1"')[:-1] + b', "messages" : []}',
        "duplicate key",
    ),
    "duplicate key in tools that are text": (
        answer("a", tools='[{"name": "f", "name": "g"}]'),
        "malformed tools",
    ),
    "deep nesting": (NESTED, "nested too deeply"),
    "nesting beyond the cap": (GOOD[:-1] + b', "x": [1, ' + b"[" * 100 + b"]" * 100 + b"]}", "nested too deeply"),
    "tools nested deeply": (GOOD[:-1] + b', "tools": [{"a": ' + b"[" * 900 + b"]" * 900 + b"}]}", "nested too deeply"),
    "an id-less row nested deeply": (GOOD[:-1] + b', "x": ' + b"[" * 990 + b"]" * 990 + b"}", "nested too deeply"),
    "16 MB line": (answer("x" * 16_000_000), "line too long"),
    "a list": (b"[1, 2]", "not a JSON object"),
    "a number of 5,000 digits": (b'{"a": ' + b"1" * 5000 + b"}", "invalid JSON"),
    "no messages": (b'{"text": "x"}', "no completion"),
    "empty conversation": (b'{"messages": []}', "empty conversation"),
    "messages that are text": (b'{"messages": "hi"}', "malformed messages"),
    "a message that is text": (b'{"messages": ["hi"]}', "malformed messages"),
    "unknown role": (GOOD.replace(b"assistant", b"bot"), "unknown role"),
    "ShareGPT role in OpenAI form": (GOOD.replace(b"assistant", b"gpt"), "unknown role"),
    "role that is a list": (GOOD.replace(b'"user"', b'["user"]'), "unknown role"),
    "question without content": (GOOD.replace(b'"content": "q"', b'"x": 1'), "message without content"),
    "null question": (GOOD.replace(b'"q"', b"null"), "message without content"),
    "integer content": (GOOD.replace(b'"q"', b"5"), "content is not text"),
    "image part": (GOOD.replace(b'"q"', b'[{"type": "image_url", "image_url": {}}]'), "unsupported content parts"),
    "two text parts": (
        GOOD.replace(b'"q"', b'[{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]'),
        "unsupported content parts",
    ),
    "ends with a question": (b'{"messages": [{"role": "user", "content": "q"}]}', "no completion"),
    "answer first and alone": (b'{"messages": [{"role": "assistant", "content": "a"}]}', "no prompt"),
    "unknown finish_reason": (answer("a", finish_reason="abort"), "unusable finish_reason"),
    "finish_reason that is a number": (answer("a", finish_reason=3), "unusable finish_reason"),
    "empty answer": (answer("", finish_reason="stop"), "empty completion"),
    "white answer": (answer(" \n\t ", finish_reason="stop"), "empty completion"),
    "null answer": (answer(None, finish_reason="stop"), "empty completion"),
    "thought without answer": (answer("<think>\nhm\n</think>\n\n", finish_reason="stop"), "empty completion"),
    "unclosed thought": (answer("<think>\nhm", finish_reason="stop"), "unclosed thought"),
    "broken tools": (answer("a", tools='[{"type": '), "malformed tools"),
    "tools that are a number": (answer("a", tools=[3]), "malformed tools"),
    "id that is a list": (answer("a", id=[1]), "malformed id"),
    "engine ids without their prompt": (answer("a", completion_token_ids=[1]), "malformed engine ids"),
    "engine ids that are text": (answer("a", prompt_token_ids=[1], completion_token_ids=["x"]), "malformed engine ids"),
    "negative engine ids": (answer("a", prompt_token_ids=[1], completion_token_ids=[-1]), "malformed engine ids"),
    "messages and conversations": (GOOD[:-1] + b', "conversations": [1]}', "ambiguous form"),
    "two answers": (GOOD[:-1] + b', "completion": "b"}', "ambiguous form"),
    "two answers, ShareGPT": (
        b'{"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}], "response": "a"}',
        "ambiguous form",
    ),
    "two system messages": (
        b'{"system": "s", "prompt": [{"role": "system", "content": "t"}, {"role": "user", "content": "q"}], '
        b'"completion": "a"}',
        "ambiguous form",
    ),
    "a system message that is a number": (GOOD[:-1] + b', "system": 3}', "content is not text"),
    "a thought as the only part": (answer([{"type": "thinking", "text": "hm"}]), "unsupported content parts"),
    "tool calls that are a number": (GOOD[:-3] + b', "tool_calls": 0}]}', "malformed tool calls"),
    "tool calls that are false": (GOOD[:-3] + b', "tool_calls": false}]}', "malformed tool calls"),
    "an empty call": (GOOD[:-3] + b', "tool_calls": {}}]}', "malformed tool calls"),
    "calls in two fields": (
        GOOD[:-3] + b', "tool_calls": [{"name": "f"}], "function_call": {"name": "f"}}]}',
        "ambiguous form",
    ),
    "completion and response": (b'{"prompt": "q", "completion": "a", "response": "b"}', "ambiguous form"),
}


@pytest.mark.parametrize(("line", "reason"), MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_line_is_rejected_by_number_and_its_neighbours_are_kept(line: bytes, reason: str) -> None:
    good, rejects, lines = read(GOOD + b"\n" + line + b"\n" + GOOD + b"\n")
    assert [(r.line, r.reason) for r in rejects] == [(2, reason)]
    assert [c.line for c in good] == [1, 3]
    assert lines == 3


def test_offsets_are_told() -> None:
    assert read(b'{"a": \xff}')[1][0].detail == "at byte 6"
    assert "character 6" in read(b'{"a": }')[1][0].detail


@pytest.mark.parametrize("body", [b"\xef\xbb\xbf" + GOOD + b"\r\n" + GOOD, GOOD + b"\n" + GOOD + b"\n"])
def test_bom_crlf_and_a_missing_final_newline_harm_nothing(body: bytes) -> None:
    good, rejects, lines = read(body)
    assert (len(good), rejects, lines) == (2, [], 2)


def test_escaped_nul_is_text_like_any_other() -> None:
    (completion,), _, _ = read(answer("a\0b"))
    assert completion.messages[-1].content == "a\0b"


def test_keys_written_inside_texts_are_no_duplicates() -> None:
    tricky = 'say {"role": "user", "content": "x"} and \\" : or ": twice ": "messages": \\\\": "'
    (completion,), rejects, _ = read(answer(tricky))
    assert completion.messages[-1].content == tricky
    assert not rejects


TRICKY = st.lists(st.sampled_from(["a", '"', "\\", ":", " ", '":', '" :', '\\"']), max_size=4).map("".join)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(TRICKY, st.sampled_from(["", " ", "\t", "\r "]), TRICKY), max_size=5), st.booleans())
def test_a_key_that_comes_twice_is_found_in_any_spelling(pairs: list[tuple[str, str, str]], nested: bool) -> None:
    text = ", ".join(f"{json.dumps(key)}{white}:{json.dumps(value)}" for key, white, value in pairs)
    given = f'{{"x": {{{text}}}}}' if nested else f"{{{text}}}"
    keys = [key for key, _, _ in pairs]
    if len(set(keys)) == len(keys):
        assert parse_object(given.encode()) == json.loads(given)
    else:
        with pytest.raises(Rejected, match="duplicate key"):
            parse_object(given.encode())


def test_integers_beyond_64_bits_in_tool_calls_stay_exact() -> None:
    call = {"function": {"name": "f", "arguments": {"n": 123456789012345678901234567890}}}
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    (completion,), _, _ = read(json.dumps({"messages": messages}).encode())
    assert completion.messages[-1].tool_calls[0]["function"]["arguments"]["n"] == 123456789012345678901234567890


def test_one_empty_answer_of_two_rejects_that_answer_alone() -> None:
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": ""}] * 1 + [
        {"role": "user", "content": "q2"},
        {"role": "assistant", "content": "a"},
    ]
    (completion,), (reject,), lines = read(json.dumps({"messages": messages}).encode())
    assert (completion.row_id[-2:], len(completion.messages)) == ("#1", 4)
    assert (reject.reason, reject.line, lines) == ("empty completion", 1, 1)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(
                ["messages", "role", "content", "prompt", "completion", "tools", "id", "finish_reason", "x"]
            ),
            inner,
            max_size=5,
        )
    ),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None)
@given(st.lists(JSON.map(json.dumps).map(str.encode) | st.binary(max_size=40) | st.just(GOOD), max_size=6))
def test_nothing_crashes_the_reader_and_no_line_is_lost(lines: list[bytes]) -> None:
    body = b"\n".join(line.replace(b"\n", b" ") for line in lines)
    if body.startswith((b"\x1f\x8b", b"\x28\xb5\x2f\xfd")):
        return
    good, rejects, count = read(body)
    assert {c.line for c in good} | {r.line for r in rejects} == set(range(1, count + 1))
    assert count == body.count(b"\n") + bool(body and not body.endswith(b"\n"))
