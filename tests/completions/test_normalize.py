"""All accepted forms of one exchange become one record; what is unclear is refused, never guessed."""

import json

import pytest

from dflash_core.completions.completion import Completion, Message, Rejected
from dflash_core.completions.normalize import normalize

EXCHANGE = (Message("user", "q"), Message("assistant", "a"))
CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}


def completion(**row: object) -> Completion:
    """The last one of the line."""
    return normalize(row, 7)[-1]


def answered(content: object, finish_reason: str | None = None, **more: object) -> Message:
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": content, **more}]
    return completion(messages=messages, finish_reason=finish_reason).messages[-1]


Q, A = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
FORMS = {
    "messages": {"messages": [Q, A]},
    "conversations": {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
    "conversations with roles": {"conversations": [Q, A]},
    "prompt and completion": {"prompt": "q", "completion": "a"},
    "prompt and response": {"prompt": "q", "response": "a"},
    "prompt of messages": {"prompt": [Q], "completion": "a"},
    "completion of messages": {"prompt": "q", "completion": [A]},
    "messages and response": {"messages": [Q], "response": "a"},
    "one text part": {"messages": [{"role": "user", "content": [{"type": "text", "text": "q"}]}, A]},
}  # fmt: skip


@pytest.mark.parametrize("row", FORMS.values(), ids=FORMS)
def test_every_form_means_the_same(row: dict[str, object]) -> None:
    assert completion(**row).messages == EXCHANGE


SPELLINGS = {
    "reasoning_content": {"content": "a", "reasoning_content": "hm"},
    "reasoning": {"content": "a", "reasoning": "hm"},
    "both fields alike": {"content": "a", "reasoning": "hm", "reasoning_content": "hm"},
    "inline": {"content": "<think>\nhm\n</think>\n\na"},
    "inline, closing tag only": {"content": "hm\n</think>\n\na"},
    "inline, tight": {"content": "<think>hm</think>a"},
}


@pytest.mark.parametrize("fields", SPELLINGS.values(), ids=SPELLINGS)
def test_all_spellings_of_a_thought_become_one(fields: dict[str, str]) -> None:
    found = answered(**fields)
    assert found._replace(spelling=None) == Message("assistant", "a", "hm")
    assert found.spelling == next((key for key in ("reasoning_content", "reasoning") if key in fields), "inline")


@pytest.mark.parametrize("content", ["<think>\n\n</think>\n\na", "<think></think>a", "</think>a"])
def test_an_empty_thought_is_no_thought(content: str) -> None:
    assert answered(content) == Message("assistant", "a")
    assert answered("a", reasoning_content="") == Message("assistant", "a")
    assert answered("a", reasoning_content=" \n") == Message("assistant", "a")


def test_a_thought_cut_by_length_has_no_answer() -> None:
    assert answered("<think>\nhm so", "length") == Message("assistant", "", "hm so", spelling="inline")
    assert answered(None, "length", reasoning_content="hm so") == Message(
        "assistant", "", "hm so", spelling="reasoning_content"
    )


def test_tags_quoted_in_the_text_are_text() -> None:
    quoted = "The tags are <think> and </think>."
    assert answered(quoted) == Message("assistant", quoted)
    assert answered("x </think> y", reasoning_content="hm") == Message(
        "assistant", "x </think> y", "hm", spelling="reasoning_content"
    )


def test_two_different_thoughts_are_ambiguous() -> None:
    for fields in ({"reasoning": "a", "reasoning_content": "b"}, {"reasoning": "a"}):
        with pytest.raises(Rejected, match="ambiguous"):
            answered("<think>c</think>x", **fields)


@pytest.mark.parametrize(
    "calls",
    [
        [CALL],
        json.dumps([CALL]),
        repr([CALL]),
        [json.dumps(CALL)],
        [CALL["function"]],
        [{"function": {"name": "f", "arguments": '{"x": 1}'}}],
        CALL,
    ],
    ids=["list", "JSON text", "Python text", "list of texts", "flat", "arguments as text", "one call"],
)
def test_tool_calls_in_every_form_are_equal(calls: object) -> None:
    assert answered(None, tool_calls=calls).tool_calls == (CALL,)


def test_a_call_in_the_field_of_older_servers_is_a_call() -> None:
    assert answered(None, function_call=CALL["function"]).tool_calls == (CALL,)
    assert answered("a", function_call=None, tool_calls=[]).tool_calls == ()


@pytest.mark.parametrize(
    "calls",
    [
        "[{",
        "[" * 200 + "]" * 200,
        "[" * 9000 + "]" * 9000,
        [{"x": 1}],
        [{"function": {"name": ""}}],
        "__import__('os')",
        7,
        [CALL, 1],
        '[{"function": {"name": "f", "arguments": {"x": "\\ud800"}}}]',
    ],
)
def test_broken_tool_calls_are_refused(calls: object) -> None:
    with pytest.raises(Rejected, match="malformed tool calls"):
        answered("", tool_calls=calls)


def test_tools_as_list_and_as_text_are_equal_and_absent_ones_are_none() -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    rows = [completion(**FORMS["messages"], tools=given) for given in (tools, json.dumps(tools), repr(tools))]
    assert {json.dumps(row.tools) for row in rows} == {json.dumps(tools)}
    assert [completion(**FORMS["messages"], tools=given).tools for given in (None, [], "")] == [(), (), ()]


def test_rows_without_id_are_named_by_their_content() -> None:
    first, second = completion(prompt="q", completion="a"), completion(completion="a", prompt="q")
    assert first.row_id == second.row_id != completion(prompt="q", completion="b").row_id
    assert completion(prompt="q", completion="a", id=5).row_id == "5"
    assert completion(prompt="q", completion="a", id="x").row_id == "x"


def test_every_answer_is_a_turn_but_one_that_nobody_asked_for() -> None:
    roles = ["assistant", "user", "assistant", "user", "assistant"]
    messages = [{"role": role, "content": str(i)} for i, role in enumerate(roles)]
    first, second = normalize({"id": "r", "messages": messages, "finish_reason": "length"}, 7)
    assert [message.content for message in first.messages] == ["0", "1", "2"]
    assert [message.content for message in second.messages] == ["0", "1", "2", "3", "4"]
    assert (first.row_id, first.finish_reason, second.row_id, second.finish_reason) == ("r#1", "stop", "r#2", "length")


def test_a_system_field_is_part_of_the_conversation() -> None:
    row = completion(system="be brief", conversations=FORMS["conversations"]["conversations"])
    assert row.messages[0] == Message("system", "be brief")
