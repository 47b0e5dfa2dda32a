"""One JSON object in any accepted form -> its `Completion`s. Roles and meanings are never guessed: unclear is rejected.

Accepted: `messages` or `conversations` (role/content, or from/value; a list, or a table's struct of lists), or `prompt`
with `completion` or `response`; reasoning as `reasoning_content`, `reasoning` or inline think tags; tools, functions
and calls as lists, JSON or Python text; one call as `function_call`, too. What a row says of itself is read: template
options, finish reasons wherever servers put them, answers that are context only.
"""

import ast
import hashlib
import json
from collections.abc import Sequence

import orjson

from dflash_core.completions.completion import Completion, FinishReason, Json, Message, Rejected, Role, Spelling
from dflash_core.completions.parsing import count_keys, without_repeats

ROLES: dict[str, Role] = {r: r for r in ("system", "developer", "user", "assistant", "tool")}
SHAREGPT_ROLES: dict[str, Role] = {**ROLES, "human": "user", "gpt": "assistant", "observation": "tool"}
FINISH_REASONS: dict[str, FinishReason] = {
    "stop": "stop",
    "eos": "stop",
    "eos_token": "stop",
    "end_turn": "stop",
    "stop_sequence": "stop",
    "length": "length",
    "max_tokens": "length",
    "tool_calls": "tool_calls",
    "tool_use": "tool_calls",
    "function_call": "tool_calls",
}
THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
SUPERVISION_KEYS = ("weight", "train", "loss")
MARKS = frozenset((*SUPERVISION_KEYS, "prefix", "partial"))
"""What a message may say of its own supervision."""
ODD_PLACES = frozenset(("finishReason", "done_reason", "stop_reason", "meta_info"))
"""Of a row's finish reason."""
REASONING_KEYS: tuple[Spelling, ...] = ("reasoning_content", "reasoning")
TEXT_PARTS = ("text", "input_text", "output_text")
MAX_LITERAL_CHARS = 1 << 20


def normalize(row: dict[str, Json], line: int) -> list[Completion]:
    """The completions that a parsed line holds, one for each answer to something asked before it; at least one.

    Raises:
        Rejected: with the reason.
    """
    given = _raw_messages(row)
    finish_reason = _finish_reason(row, given[-1])
    last = len(given) - 1
    ends: list[FinishReason | None] = ["stop"] * last
    ends.append(finish_reason)
    for i in range(last):
        if type(given[i]) is dict and "finish_reason" in given[i]:
            ends[i] = _finish_reason({}, given[i]) or "stop"
    messages = tuple([message_of(m, i, ends[i]) for i, m in enumerate(given)])
    answers = [i for i, message in enumerate(messages) if message.role == "assistant"]
    turns = _turns(messages, given)
    row_id, tools, options = row_id_of(row), _offered_tools(row), _template_options(row)
    prompt_ids, completion_ids = _engine_ids(row)
    found = [
        Completion(
            row_id=row_id if len(answers) == 1 else f"{row_id}#{answers.index(turn)}",
            line=line,
            messages=messages[: turn + 1],
            tools=tools,
            finish_reason=ends[turn],
            options=options,
        )
        for turn in turns
    ]
    if turns[-1] == last:
        found[-1] = found[-1]._replace(prompt_token_ids=prompt_ids, completion_token_ids=completion_ids)
    return found


def _raw_messages(row: dict[str, Json]) -> list[Json]:
    """The messages as they are written, the answer last."""
    named = [row[key] for key in ("messages", "conversations") if row.get(key) is not None]
    prompt = row.get("prompt")
    answers = [row[key] for key in ("completion", "response") if row.get(key) is not None]
    if len(named) == 2 or len(answers) == 2:
        raise Rejected("ambiguous form", "two fields hold the conversation or the answer")
    if row.get("choices") is not None:
        detail = "choices of a server without their prompt; join them with their request into messages"
        raise Rejected("a server's record", detail)
    if not named and "custom_id" in row:
        result = "response" in row or "error" in row
        detail = "a batch API's result without its prompt" if result else "a batch API's request without its answer"
        raise Rejected("a server's record", f"{detail}; join requests and results by custom_id into messages")
    if not named and not (prompt is not None and ("completion" in row or "response" in row)):
        raise Rejected("no completion", "neither messages, conversations nor prompt with completion or response")
    messages = named[0] if named else prompt
    if type(messages) is dict:
        messages = _from_columns(messages)
    if type(messages) is str and not named:
        messages = [{"role": "user", "content": messages}]
    conversation = conversation_of(messages, row)
    if answers or not named:
        if _role(conversation[-1]) == "assistant":
            raise Rejected("ambiguous form", "the conversation ends with an answer, and another field holds one, too")
        return [*conversation, *_answer(row, answers[0] if answers else "")]
    return conversation


def _from_columns(columns: dict[str, Json]) -> list[Json]:
    """Messages that a table turned into a struct of lists."""
    lengths = {len(values) if type(values) is list else -1 for values in columns.values() if values is not None}
    if len(lengths) != 1 or -1 in lengths:
        raise Rejected("malformed messages", "the conversation is not a list")
    named = {name: values for name, values in columns.items() if values is not None}
    return [dict(zip(named, values, strict=True)) for values in zip(*named.values(), strict=True)]


def conversation_of(messages: Json, row: dict[str, Json]) -> list[Json]:
    """A row's messages, led by its separate field `system` where it has one.

    Raises:
        Rejected: they are not a list, or an empty one, or it is not clear what their system message is.
    """
    if type(messages) is not list:
        raise Rejected("malformed messages", "the conversation is not a list")
    if not messages:
        raise Rejected("empty conversation")
    if row.get("system") in (None, ""):
        return messages
    if _role(messages[0]) == "system":
        raise Rejected("ambiguous form", "a field `system` and a system message")
    return [{"role": "system", "content": row["system"]}, *messages]


def _answer(row: dict[str, Json], answer: Json) -> list[Json]:
    if type(answer) is str:
        extra = {key: row[key] for key in (*REASONING_KEYS, "tool_calls") if key in row}
        return [{"role": "assistant", "content": answer, **extra}]
    if type(answer) is dict:
        return [answer]
    if type(answer) is list and len(answer) == 1:
        return answer
    raise Rejected("malformed messages", "the answer is neither text nor one message")


def message_of(raw: Json, index: int, finish_reason: FinishReason | None) -> Message:
    """One message of a conversation; `finish_reason` is its own, and matters for an answer only. Raises Rejected."""
    if type(raw) is not dict:
        raise Rejected("malformed messages", f"message {index} is not an object")
    role, content = _role(raw), raw.get("content" if "role" in raw else "value")
    if role is None:
        raise Rejected("unknown role", f"message {index}: {raw.get('role', raw.get('from'))!r}")
    text = _text(content, index, optional=role == "assistant")
    extra: tuple[tuple[str, str], ...] = ()
    if "name" in raw or "tool_call_id" in raw:
        extra = tuple((key, raw[key]) for key in ("name", "tool_call_id") if type(raw.get(key)) is str)
    if role != "assistant":
        return Message(role, text, extra=extra)
    reasoning, text = split_reasoning(_recorded_reasoning(raw, index), text, finish_reason)
    spelling: Spelling | None = None
    if reasoning is not None:
        recorded = raw.get("reasoning_content"), raw.get("reasoning")
        spelling = "reasoning_content" if recorded[0] else "reasoning" if recorded[1] else "inline"
    return Message(role, text, reasoning, _recorded_calls(raw, index), extra, spelling)


def _role(raw: Json) -> Role | None:
    """Of a message in either form; None: none that is known."""
    if type(raw) is not dict:
        return None
    name, roles = (raw["role"], ROLES) if "role" in raw else (raw.get("from"), SHAREGPT_ROLES)
    return roles.get(name) if type(name) is str else None


def _recorded_calls(raw: dict[str, Json], index: int) -> tuple[dict[str, Json], ...]:
    """Calls in their field, or the one call in the field of older servers."""
    given = [raw[key] for key in ("tool_calls", "function_call") if raw.get(key) not in (None, "", [])]
    if len(given) == 2:
        raise Rejected("ambiguous form", f"message {index} has tool_calls and a function_call")
    return tool_calls_of(given[0]) if given else ()


def _text(content: Json, index: int, *, optional: bool) -> str:
    if type(content) is str:
        return content
    if content is None:
        if optional:
            return ""
        raise Rejected("message without content", f"message {index}")
    if type(content) is list:
        # Engines join several parts in different ways; one text part means the same to all.
        part = content[0] if len(content) == 1 and type(content[0]) is dict else {}
        if part.get("type", "text") in TEXT_PARTS and type(part.get("text")) is str:
            return str(part["text"])
        raise Rejected("unsupported content parts", f"message {index} has {len(content)} parts, not one text")
    raise Rejected("content is not text", f"message {index} holds a {type(content).__name__}")


def _recorded_reasoning(raw: dict[str, Json], index: int) -> str | None:
    first, second = raw.get("reasoning_content"), raw.get("reasoning")
    if (first is not None and type(first) is not str) or (second is not None and type(second) is not str):
        raise Rejected("reasoning is not text", f"message {index}")
    if first and second and first != second:
        raise Rejected("ambiguous form", f"message {index} has two different thoughts")
    return first or second or None


def split_reasoning(recorded: str | None, content: str, finish_reason: FinishReason | None) -> tuple[str | None, str]:
    """Bring the three spellings of a thought to one: (thought, answer). White space at its edges belongs to its tags.

    Raises Rejected.
    """
    if recorded is not None:
        if content.lstrip().startswith(THINK_OPEN):
            raise Rejected("ambiguous form", "a thought in its own field and another in the content")
        return recorded.strip("\n") if recorded.strip() else None, content
    if THINK_OPEN not in content and THINK_CLOSE not in content:
        return None, content
    opened = content.lstrip().startswith(THINK_OPEN)
    before, closed, after = content.partition(THINK_CLOSE)
    if not closed and opened:
        if finish_reason != "length":
            raise Rejected("unclosed thought", "the answer opens a think block and never closes it")
        return before.lstrip()[len(THINK_OPEN) :].strip("\n") or None, ""
    if not opened and (not closed or THINK_OPEN in before):
        return None, content  # tags that are quoted somewhere in the text
    # Without the opening tag it was part of the prompt, which is how several templates start the turn.
    thought = before.lstrip()[len(THINK_OPEN) :] if opened else before
    return (thought.strip("\n") or None) if thought.strip() else None, after.lstrip("\n")


def tool_calls_of(raw: Json) -> tuple[dict[str, Json], ...]:
    """The calls of one message, arguments as objects. Raises Rejected."""
    calls = _decoded(raw, "malformed tool calls")
    if type(calls) is dict:
        calls = [calls]
    if type(calls) is not list:
        raise Rejected("malformed tool calls", "neither a list nor its text")
    return tuple(_tool_call(call) for call in calls)


def _tool_call(raw: Json) -> dict[str, Json]:
    call = _decoded(raw, "malformed tool calls")
    function = call.get("function", call) if type(call) is dict else None
    if type(function) is not dict or type(function.get("name")) is not str or not function["name"]:
        raise Rejected("malformed tool calls", "a call without the name of its function")
    arguments = function.get("arguments")
    if type(arguments) is dict and _holds_null(arguments):
        raise Rejected(
            "nulls in tool calls", f"arguments of {function['name']}: from a table? give them as recorded text"
        )
    arguments = {} if arguments in (None, "") else _decoded(arguments, "malformed tool calls")
    if type(arguments) is not dict:
        raise Rejected("malformed tool calls", f"arguments of {function['name']} are not an object")
    named = {"id": call["id"]} if type(call.get("id")) is str else {}
    return {**named, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def tools_of(raw: Json) -> tuple[dict[str, Json], ...]:
    """Tools given as a list, or as its text. Raises Rejected."""
    if raw in (None, "", []):
        return ()
    tools = _decoded(raw, "malformed tools")
    if type(tools) is not list:
        raise Rejected("malformed tools", "neither a list nor its text")
    decoded = tuple(_decoded(tool, "malformed tools") for tool in tools)
    if not all(type(tool) is dict for tool in decoded):
        raise Rejected("malformed tools", "a tool that is not an object")
    if type(raw) is list and _holds_null_property(raw):
        raise Rejected(
            "nulls in tools", "a property of another row's tool, from a table? give the tools as recorded text"
        )
    return decoded


def _holds_null(value: Json) -> bool:
    """Whether a key somewhere is null, as a table writes it for a key that only other rows have."""
    if type(value) is list:
        return any(map(_holds_null, value))
    return type(value) is dict and any(one is None or _holds_null(one) for one in value.values())


def _holds_null_property(value: Json) -> bool:
    """Whether a schema somewhere has a property that is null, which no schema is."""
    if type(value) is list:
        return any(map(_holds_null_property, value))
    if type(value) is not dict:
        return False
    properties = value.get("properties")
    return (type(properties) is dict and None in properties.values()) or any(map(_holds_null_property, value.values()))


def _decoded(value: Json, reason: str) -> Json:
    """A value given as itself, as JSON text or as the text Python prints for it."""
    if type(value) is not str:
        return value
    if len(value) > MAX_LITERAL_CHARS:
        raise Rejected(reason, f"a text of {len(value)} characters")
    try:
        parsed = json.loads(value, object_pairs_hook=without_repeats)
    except Rejected as rejected:
        raise Rejected(reason, str(rejected)) from None
    except (ValueError, RecursionError):
        try:
            parsed = ast.literal_eval(value)
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            raise Rejected(reason, f"neither JSON nor Python text: {value[:60]!r}") from None
    try:
        plain = json.dumps(parsed, allow_nan=False, ensure_ascii=False)
        plain.encode("utf8")
        exact = json.loads(plain)
        count_keys([exact])
        return exact
    except Rejected:
        raise Rejected(reason, "nested too deeply") from None
    except (ValueError, TypeError, RecursionError) as error:
        raise Rejected(reason, f"holds what JSON cannot: {error}") from None


def _turns(messages: Sequence[Message], given: Sequence[Json]) -> tuple[int, ...]:
    """The answers that become rows: those with something asked before them, and not marked as context only."""
    if messages[-1].role != "assistant":
        raise Rejected("no completion", f"the conversation ends with the role {messages[-1].role!r}")
    asked, turns, context_only = False, [], 0
    for i, message in enumerate(messages):
        if message.role == "assistant" and asked and not _is_context_only(given[i], i):
            turns.append(i)
        elif message.role == "assistant" and asked:
            context_only += 1
        asked = asked or message.role in ("user", "tool")
    if not turns and context_only:
        raise Rejected("no supervised answer", "every answer is marked as context only (weight 0, train or loss false)")
    if not turns:
        raise Rejected("no prompt", "the conversation has nothing before its answer")
    return tuple(turns)


def _is_context_only(raw: dict[str, Json], index: int) -> bool:
    """Whether a message says of itself that nothing is to be learned from it.

    Raises:
        Rejected: it says something that cannot be done: a part of a weight, or a beginning that the client gave.
    """
    if MARKS.isdisjoint(raw):
        return False
    marks = [raw[key] for key in SUPERVISION_KEYS if raw.get(key) is not None]
    if not all(mark in (0, 1) for mark in marks):
        raise Rejected(
            "unusable weight", f"message {index}: {marks!r}; an answer counts (1, true) or it does not (0, false)"
        )
    if raw.get("prefix") or raw.get("partial"):
        raise Rejected("a given prefix", f"message {index} begins with text of the client's, and not where it ends")
    return not all(marks)


def _finish_reason(row: dict[str, Json], answer: Json) -> FinishReason | None:
    """Of the answer, from wherever servers put it; several places have to agree. None: not recorded."""
    recorded = row.get("finish_reason")
    beside = type(answer) is dict and "finish_reason" in answer
    if recorded in ("stop", "length") and not beside and ODD_PLACES.isdisjoint(row):
        return FINISH_REASONS[recorded]  # nearly every row
    meta = row.get("meta_info")
    places = [recorded, row.get("finishReason"), row.get("done_reason")]
    places += [meta.get("finish_reason") if type(meta) is dict else None]
    places += [answer.get("finish_reason") if type(answer) is dict else None]
    named = [place.get("type") if type(place) is dict else place for place in places]
    # vLLM's stop_reason is the stop string, beside a finish_reason; Anthropic's is the reason itself.
    if all(name in (None, "") for name in named):
        named.append(row.get("stop_reason"))
    reasons = set[FinishReason]()
    for name in named:
        if name in (None, ""):
            continue
        reason = FINISH_REASONS.get(name.lower()) if type(name) is str else None
        if reason is None:
            raise Rejected("unusable finish_reason", repr(name)[:60])
        reasons.add(reason)
    if len(reasons) > 1:
        raise Rejected("ambiguous form", f"two finish reasons: {', '.join(sorted(reasons))}")
    return next(iter(reasons), None)


def _template_options(row: dict[str, Json]) -> str:
    """The options that were sent with the request, as JSON; a null among them is a table's, for none."""
    if "chat_template_kwargs" not in row and "sampling" not in row:
        return ""
    sampling = row.get("sampling")
    given = [row.get("chat_template_kwargs"), sampling.get("chat_template_kwargs") if type(sampling) is dict else None]
    named = [options for options in given if options is not None]
    if any(type(options) is not dict for options in named) or (len(named) == 2 and named[0] != named[1]):
        raise Rejected("malformed template options", "chat_template_kwargs is to be one object")
    options = {name: value for name, value in (named[0] if named else {}).items() if value is not None}
    return json.dumps(options, sort_keys=True) if options else ""


def _offered_tools(row: dict[str, Json]) -> tuple[dict[str, Json], ...]:
    """The tools, or the functions of the older form of the API, which servers render as tools."""
    tools = tools_of(row.get("tools"))
    if "functions" not in row:
        return tools
    functions = tools_of(row["functions"])
    if tools and functions:
        raise Rejected("ambiguous form", "tools and functions")
    return tools or tuple({"type": "function", "function": function} for function in functions)


def _engine_ids(row: dict[str, Json]) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None]:
    prompt, completion = row.get("prompt_token_ids"), row.get("completion_token_ids")
    if completion is None:
        return None, None  # prompt ids alone say nothing about the answer; its text is rendered
    for ids in (prompt, completion):
        if type(ids) is not list or not ids or not all(type(i) is int and 0 <= i < 1 << 31 for i in ids):
            raise Rejected("malformed engine ids", "prompt_token_ids and completion_token_ids must both list ids")
    return tuple(prompt), tuple(completion)  # type: ignore[arg-type]


def row_id_of(row: dict[str, Json]) -> str:
    """The row's own id, else a hash of its content. Raises Rejected."""
    given = row.get("id")
    if type(given) is float and given.is_integer():
        given = int(given)  # a column of ids with gaps, from a table
    if type(given) is int or (type(given) is str and given):
        return str(given)
    if given is not None and given != "":
        raise Rejected("malformed id", f"a {type(given).__name__}")
    try:
        content = orjson.dumps(row, option=orjson.OPT_SORT_KEYS)
    except TypeError:  # an integer beyond 64 bits
        content = json.dumps(row, sort_keys=True).encode()
    return "sha256-" + hashlib.sha256(content).hexdigest()[:24]
