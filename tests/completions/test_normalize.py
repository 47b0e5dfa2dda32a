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


def reject(**row: object) -> str:
    """Reason and detail."""
    with pytest.raises(Rejected) as caught:
        normalize(row, 7)
    return str(caught.value)


WRONG = {"role": "assistant", "content": "planted"}
AGAIN = [{"role": "user", "content": "sure?"}, {"role": "assistant", "content": "b"}]


@pytest.mark.parametrize("mark", [{"weight": 0}, {"weight": 0.0}, {"train": False}, {"loss": False}, {"loss": 0}])
def test_an_answer_that_is_not_to_be_learned_is_context_and_no_row(mark: dict[str, object]) -> None:
    (row,) = normalize({"id": "r", "messages": [Q, WRONG | mark, *AGAIN]}, 7)
    assert row.row_id == "r#1"
    assert [m.content for m in row.messages] == ["q", "planted", "sure?", "b"]
    assert reject(messages=[Q, WRONG | mark]).startswith("no supervised answer")
    (row,) = normalize({"messages": [Q, A, AGAIN[0], WRONG | mark], "finish_reason": "length"}, 7)
    assert (len(row.messages), row.finish_reason) == (2, "stop")


@pytest.mark.parametrize("mark", [{"weight": 1}, {"weight": 1.0}, {"train": True}, {"weight": None, "loss": True}, {}])
def test_an_answer_that_counts_is_a_row_as_without_the_mark(mark: dict[str, object]) -> None:
    assert completion(messages=[Q, A | mark]).messages == EXCHANGE


@pytest.mark.parametrize("mark", [{"weight": 0.5}, {"weight": 2}, {"train": "no"}, {"loss": [0]}])
def test_a_weight_that_cannot_be_given_is_refused(mark: dict[str, object]) -> None:
    assert reject(messages=[Q, A | mark]).startswith("unusable weight: message 1")


@pytest.mark.parametrize("key", ["prefix", "partial"])
def test_an_answer_that_the_client_began_is_refused(key: str) -> None:
    assert "message 1" in reject(messages=[Q, A | {key: True}])
    assert completion(messages=[Q, A | {key: False}]).messages == EXCHANGE


def test_functions_of_the_older_form_are_tools() -> None:
    function = {"name": "f", "parameters": {"type": "object"}}
    tool = {"type": "function", "function": function}
    assert completion(messages=[Q, A], functions=[function]) == completion(messages=[Q, A], tools=[tool])._replace(
        row_id=completion(messages=[Q, A], functions=[function]).row_id
    )
    assert reject(messages=[Q, A], functions=[function], tools=[tool]).startswith("ambiguous form")


def test_options_of_the_template_are_read_where_requests_have_them() -> None:
    options = {"enable_thinking": False, "effort": "low"}
    beside, within = {"chat_template_kwargs": options}, {"sampling": {"chat_template_kwargs": options, "top_p": 0.9}}
    for row in (beside, within, beside | within):
        assert json.loads(completion(messages=[Q, A], **row).options) == options
    for none in ({}, {"chat_template_kwargs": None}, {"chat_template_kwargs": {"effort": None}}, {"sampling": {}}):
        assert completion(messages=[Q, A], **none).options == ""
    assert reject(messages=[Q, A], chat_template_kwargs="no").startswith("malformed template options")
    assert reject(messages=[Q, A], chat_template_kwargs={"effort": "high"}, **within).startswith("malformed template")


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        ({"finish_reason": "STOP"}, "stop"),
        ({"finishReason": "MAX_TOKENS"}, "length"),
        ({"done_reason": "length"}, "length"),
        ({"stop_reason": "end_turn"}, "stop"),
        ({"finish_reason": "stop", "stop_reason": "</answer>"}, "stop"),
        ({"meta_info": {"finish_reason": {"type": "length", "length": 9}}}, "length"),
        ({"messages": [Q, A | {"finish_reason": "length"}]}, "length"),
        ({"finish_reason": None, "done_reason": "stop"}, "stop"),
        ({}, None),
    ],
)
def test_finish_reasons_are_found_where_servers_put_them(place: dict[str, object], expected: str | None) -> None:
    assert completion(**{"messages": [Q, A]} | place).finish_reason == expected


def test_finish_reasons_that_disagree_are_ambiguous_and_unknown_ones_refused() -> None:
    assert reject(messages=[Q, A], finish_reason="stop", done_reason="length").startswith("ambiguous form")
    assert reject(messages=[Q, A], meta_info={"finish_reason": {"type": "abort"}}).startswith("unusable finish_reason")


def test_an_earlier_answer_that_was_cut_is_a_cut_row() -> None:
    first, second = normalize({"messages": [Q, A | {"finish_reason": "length"}, *AGAIN], "finish_reason": "stop"}, 7)
    assert (first.finish_reason, second.finish_reason) == ("length", "stop")


def test_what_a_table_makes_of_rows_is_read() -> None:
    assert completion(id=12.0, messages=[Q, A]).row_id == "12"
    columns = {"role": ["user", "assistant"], "content": ["q", "a"], "name": None}
    assert completion(messages=columns).messages == EXCHANGE
    for torn in ({"role": ["user"], "content": ["q", "a"]}, {"role": "user", "content": "q"}, {}):
        assert reject(messages=torn).startswith("malformed messages")
    assert reject(id=12.5, messages=[Q, A]).startswith("malformed id")


def test_nulls_that_only_a_table_can_have_written_are_never_rendered() -> None:
    def called(arguments: object) -> dict[str, object]:
        return {"messages": [Q, A | {"tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}]}

    for padded in ({"x": 1, "y": None}, {"x": {"y": None}}, {"x": [{"y": None}]}):
        assert reject(**called(padded)).startswith("nulls in tool calls")
        recorded = completion(**called(json.dumps(padded))).messages[-1].tool_calls[0]["function"]["arguments"]
        assert recorded == padded, "the model's own null stays"
    schema = {
        "type": "object",
        "required": None,
        "properties": {"x": {"type": "string", "default": None, "enum": ["a", None]}},
    }
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    assert completion(messages=[Q, A], tools=[tool]).tools == (tool,)
    padded_tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"y": None}}}}
    assert reject(messages=[Q, A], tools=[padded_tool]).startswith("nulls in tools")


def test_records_of_a_server_are_refused_with_what_they_lack() -> None:
    choice = {"message": A, "finish_reason": "length"}
    body = {"status_code": 200, "body": {"choices": [choice]}}
    assert "without its prompt" in reject(custom_id="1", response=body, error=None)
    assert "without its prompt" in reject(custom_id="1", response=None, error={"message": "too long"})
    assert "without its answer" in reject(custom_id="1", method="POST", body={"messages": [Q]})
    assert "without their prompt" in reject(id="chatcmpl-1", choices=[choice])
    assert reject(prompt="q", response=A, choices=[choice]).startswith("a server's record")
    assert completion(custom_id="1", messages=[Q, A]).messages == EXCHANGE
