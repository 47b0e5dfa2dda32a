"""Every prompt once, in order, with all that it came from, whatever the server does and however often it is killed."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from dflash_core.completions.generation.generate import FileGenerated, FileNotGenerated, FileOutcome, Watch
from dflash_core.completions.generation.progress import Progress
from dflash_core.completions.generation.servers import ServersGone
from dflash_core.completions.reading import CompletionFile
from dflash_core.completions.record import Completion
from dflash_core.recipe import Recipe
from dflash_core.records import GeneratedFile, Reject
from dflash_core.storage.store import Stores
from tests.chat_server import ChatServer, answer_to

Serve = Callable[..., ChatServer]
MakeRecipe = Callable[..., Recipe]
Prompts = Callable[[str, list[str]], None]
Generate = Callable[..., list[FileOutcome]]


def rows_of(stores: Stores, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stores.source.get(f"{name}.jsonl").body.splitlines()]


def made(outcomes: list[FileOutcome]) -> list[GeneratedFile]:
    assert all(isinstance(outcome, FileGenerated) for outcome in outcomes), outcomes
    return [outcome.manifest for outcome in outcomes if isinstance(outcome, FileGenerated)]


def reason_of(outcomes: list[FileOutcome]) -> str:
    (outcome,) = outcomes
    assert isinstance(outcome, FileNotGenerated)
    return outcome.reason


def rejects_of(stores: Stores, manifest: GeneratedFile) -> list[Reject]:
    return [Reject.model_validate_json(line) for line in stores.derived.read(manifest.rejects).splitlines()]


def test_every_prompt_becomes_a_row_in_input_order(
    serve: Serve, recipe_on: MakeRecipe, prompts: Prompts, generate: Generate, stores: Stores
) -> None:
    """Answers come in another order: every third is slow."""
    texts = [f"Question {i}{' [fast]' if i % 3 else ''}?" for i in range(40)]
    prompts("a", texts)
    prompts("b", texts[:7])
    manifests = made(generate(recipe_on(serve(delay_s=0.05), concurrency=8)))
    assert {manifest.partition: manifest.written for manifest in manifests} == {"a": 40, "b": 7}
    rows = rows_of(stores, "a")
    assert [row["messages"][-1]["content"] for row in rows] == [answer_to(text) for text in texts]
    assert [(row["id"], row["prompt_line"]) for row in rows] == [(f"a-{i}", i + 1) for i in range(40)]
    completions = list(CompletionFile(stores.source.get("a.jsonl").body, "a"))
    assert all(isinstance(one, Completion) and one.messages[-1].reasoning for one in completions)


def test_a_row_tells_all_that_it_came_from(
    serve: Serve, recipe_on: MakeRecipe, prompts: Prompts, generate: Generate, stores: Stores
) -> None:
    prompts("a", ["One?"])
    server = serve(token_ids=True, reasoning_field="reasoning")
    generate(recipe_on(server))
    (row,) = rows_of(stores, "a")
    assert row["messages"][0] == {"role": "user", "content": "One?"}
    assert row["messages"][1]["reasoning_content"].startswith("Thinking")
    assert row["prompt_token_ids"] == [ord(c) for c in "One?"]
    assert row["completion_token_ids"] == [ord(c) for c in answer_to("One?")]
    assert row["usage"]["total_tokens"] == 4 + len(answer_to("One?"))
    assert (row["model"], row["server"], row["finish_reason"]) == ("tiny", server.url, "stop")
    assert (row["sampling"]["temperature"], row["sampling"]["max_tokens"]) == (0.5, 64)
    assert row["seed"] == server.seen.bodies[-1]["seed"]
    assert (row["prompt_file"], row["prompt_line"]) == ("prompts/a.jsonl", 1)


def test_tools_are_passed_through_and_calls_come_back(
    serve: Serve, recipe_on: MakeRecipe, generate: Generate, stores: Stores
) -> None:
    """A prompt with a tool's result in it, and an answer that calls a tool."""
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    call = {"id": "c0", "type": "function", "function": {"name": "add", "arguments": {"a": 0}}}
    messages = [
        {"role": "user", "content": "Add."},
        {"role": "assistant", "content": "", "reasoning": "I call.", "tool_calls": [call]},
        {"role": "tool", "content": "0 [say:call]", "tool_call_id": "c0"},
    ]
    assert stores.prompts is not None
    stores.prompts.put("a.jsonl", json.dumps({"messages": messages, "tools": tools}).encode())
    server = serve()
    made(generate(recipe_on(server)))
    body = server.seen.bodies[-1]
    assert body["tools"] == tools
    sent = body["messages"]
    assert isinstance(sent, list)
    assert sent[1]["tool_calls"][0]["function"]["arguments"] == '{"a": 0}'
    assert (sent[1]["reasoning_content"], sent[2]["tool_call_id"]) == ("I call.", "c0")
    (completion,) = CompletionFile(stores.source.get("a.jsonl").body, "a")
    assert isinstance(completion, Completion)
    assert completion.finish_reason == "tool_calls"
    assert completion.tools == tuple(tools)
    assert completion.messages[-1].tool_calls[0]["function"] == {"name": "add", "arguments": {"a": 1}}


def test_prompts_that_end_with_an_answer(
    serve: Serve, recipe_on: MakeRecipe, generate: Generate, stores: Stores
) -> None:
    """Rejected, unless the recipe says that the answers shall be made anew."""
    messages = [{"role": "user", "content": "One?"}, {"role": "assistant", "content": "OK."}]
    lines = [{"messages": messages}, {"prompt": "Two?"}, {"messages": []}, {"messages": messages[1:]}]
    assert stores.prompts is not None
    stores.prompts.put("a.jsonl", "\n".join(map(json.dumps, lines)).encode())
    server = serve()
    (manifest,) = made(generate(recipe_on(server)))
    assert manifest.dropped == {"prompt with an answer": 2, "empty conversation": 1}
    (manifest,) = made(generate(recipe_on(server, answers_in_prompts="replace")))
    assert manifest.dropped == {"empty conversation": 1, "no prompt": 1}
    assert [row["messages"][-1]["content"] for row in rows_of(stores, "a")] == [answer_to("One?"), answer_to("Two?")]


MISCHIEF = ("429", "500", "503", "reset", "half", "text", "list", "nochoice", "stall")


def test_trouble_that_passes_costs_no_row(
    serve: Serve, recipe_on: MakeRecipe, prompts: Prompts, generate: Generate, stores: Stores
) -> None:
    texts = [f"{i} [once:{MISCHIEF[i % len(MISCHIEF)]}]" for i in range(18)] + ["calm"]
    prompts("a", texts)
    server = serve()
    (manifest,) = made(generate(recipe_on(server, request_timeout_s=2, concurrency=32)))
    assert manifest.outcomes == {"good": 19}
    assert [row["messages"][-1]["content"] for row in rows_of(stores, "a")] == [answer_to(text) for text in texts]
    assert all(server.seen.requests[text] == 2 for text in texts[1:18]), server.seen.requests


def test_bad_answers_are_counted_and_named(
    serve: Serve, recipe_on: MakeRecipe, prompts: Prompts, generate: Generate, stores: Stores
) -> None:
    """Lines = written + dropped, by reason; one bad prompt stops nothing; what was refused is asked again next time."""
    bad = ["[say:length]", "[say:thought]", "[say:empty]", "[say:loop]", "[say:filter]", "[always:400]", "[always:500]"]
    texts = [*bad, "same", "same", *(f"good {i}" for i in range(20))]
    prompts("a", texts)
    server = serve()
    recipe = recipe_on(server, attempts=2, sampling={"max_tokens": 64, "seed": False})
    (manifest,) = made(generate(recipe))
    assert manifest.outcomes == {
        "good": 21, "truncated": 2, "refused": 2, "empty": 1, "loop": 1, "unanswered": 1, "duplicate": 1,
    }  # fmt: skip
    assert manifest.cut_in_thought == 1
    assert manifest.dropped == {"refused": 2, "empty": 1, "loop": 1, "unanswered": 1, "duplicate": 1}
    assert manifest.lines == manifest.written + sum(manifest.dropped.values())
    rejects = {reject.line: reject for reject in rejects_of(stores, manifest)}
    assert sorted(rejects) == [3, 4, 5, 6, 7, 9]
    assert "mischief 400" in rejects[6].detail
    assert "2 tries failed" in rejects[7].detail
    before = server.seen.requests.copy()
    generate(recipe)
    asked = {text for text in server.seen.requests - before if text in texts[1:]}
    assert asked == {"[always:400]", "[always:500]", "[say:filter]"}


def test_a_prompt_has_a_total_time(
    serve: Serve, recipe_on: MakeRecipe, prompts: Prompts, generate: Generate, stores: Stores
) -> None:
    """A server that takes a request and never answers it does not hold the others up."""
    prompts("a", ["[always:stall]", "Hi?"])
    (manifest,) = made(generate(recipe_on(serve(), request_timeout_s=0.5, total_timeout_s=1.5)))
    assert manifest.outcomes == {"good": 1, "unanswered": 1}
    (reject,) = rejects_of(stores, manifest)
    assert "no answer within 1.5 s" in reject.detail


def test_a_truncated_answer_may_take_more_tokens(
    serve: Serve, recipe_on: MakeRecipe, prompts: Prompts, generate: Generate, stores: Stores
) -> None:
    prompts("a", ["[say:length]", "[say:thought]", "fine"])
    (manifest,) = made(generate(recipe_on(serve(), outcomes={"truncated": "retry", "max_bad_share": 1.0})))
    assert manifest.outcomes == {"good": 2, "truncated": 1}
    assert manifest.dropped == {"truncated": 1}
    assert [row["sampling"]["max_tokens"] for row in rows_of(stores, "a")] == [128, 64]


def test_a_hopeless_file_is_given_up_early(
    serve: Serve, recipe_on: MakeRecipe, prompts: Prompts, generate: Generate, stores: Stores
) -> None:
    """87 % of the answers are empty: a few are enough to know."""
    prompts("a", [f"{i} {'[say:empty]' if i % 8 else ''}" for i in range(400)])
    prompts("b", ["fine"])
    server = serve(delay_s=0.01)
    outcomes = generate(recipe_on(server, concurrency=4, outcomes={"empty": "drop", "enough_answers": 16}))
    failed = [outcome for outcome in outcomes if isinstance(outcome, FileNotGenerated)]
    assert len(failed) == 1
    assert "given up" in failed[0].reason
    assert "empty" in failed[0].reason
    assert server.seen.answers < 60
    assert [key for key, _, _ in stores.source.list()] == ["b.jsonl"]


def test_what_was_answered_is_not_asked_again(
    serve: Serve, recipe_on: MakeRecipe, prompts: Prompts, generate: Generate, stores: Stores
) -> None:
    """The ledger knows content, not line numbers; a valid file costs nothing at all; `anew` forgets."""
    prompts("a", [f"Question {i}" for i in range(10)])
    server = serve()
    recipe = recipe_on(server)
    generate(recipe)
    first = stores.source.get("a.jsonl").body
    seen = server.seen.answers
    (again,) = generate(recipe)
    assert isinstance(again, FileGenerated)
    assert again.skipped
    assert server.seen.answers == seen
    prompts("a", ["New", *(f"Question {i}" for i in reversed(range(10)))])
    (manifest,) = made(generate(recipe))
    assert manifest.asked == 1
    assert [row["messages"][-1]["content"] for row in rows_of(stores, "a")][-1] == answer_to("Question 0")
    (manifest,) = made(generate(recipe, anew=True))
    assert manifest.asked == 11
    prompts("a", [f"Question {i}" for i in range(10)])
    generate(recipe)
    assert stores.source.get("a.jsonl").body == first


@pytest.mark.parametrize(
    "change",
    [{"model": "other"}, {"sampling": {"max_tokens": 64, "temperature": 0.6}}, {"sampling": {"max_tokens": 65}}],
)
def test_a_changed_request_is_a_new_key(
    serve: Serve, recipe_on: MakeRecipe, prompts: Prompts, generate: Generate, change: dict[str, Any]
) -> None:
    prompts("a", ["One", "Two"])
    generate(recipe_on(serve()))
    server = serve(model=change.get("model", "tiny"))
    (manifest,) = made(generate(recipe_on(server, **change)))
    assert manifest.asked == 2


def test_a_changed_policy_asks_nothing(
    serve: Serve, recipe_on: MakeRecipe, prompts: Prompts, generate: Generate
) -> None:
    prompts("a", ["One", "Two", "[say:length]"])
    server = serve()
    (kept,) = made(generate(recipe_on(server)))
    (dropped,) = made(generate(recipe_on(server, outcomes={"truncated": "drop"})))
    assert (kept.written, dropped.written, dropped.asked) == (3, 2, 0)


def test_a_foreign_file_is_left_alone(
    serve: Serve, recipe_on: MakeRecipe, prompts: Prompts, generate: Generate, stores: Stores
) -> None:
    prompts("a", ["One"])
    stores.source.put("a.jsonl", b"precious\n")
    server = serve()
    assert "was not generated" in reason_of(generate(recipe_on(server)))
    assert server.seen.answers == 0
    assert stores.source.get("a.jsonl").body == b"precious\n"
    made(generate(recipe_on(server, overwrite=True)))
    assert len(rows_of(stores, "a")) == 1


def test_servers_that_are_gone_end_it_with_what_was_answered_kept(
    serve: Serve, recipe_on: MakeRecipe, prompts: Prompts, generate: Generate, stores: Stores
) -> None:
    prompts("a", [f"Question {i}{' [always:reset]' if i > 20 else ''}" for i in range(60)])
    server = serve()
    with pytest.raises(ServersGone, match="no server has answered for"):
        generate(recipe_on(server, patience_s=0.2, attempts=100, concurrency=4))
    keys = [key for key, _, _ in stores.derived.list("generated_completions/a/")]
    assert sum(len(stores.derived.get(key).body.splitlines()) for key in keys) == 21


def test_a_long_answer_outlasts_the_patience_with_others(
    serve: Serve, recipe_on: MakeRecipe, prompts: Prompts, generate: Generate
) -> None:
    """One prompt is reset again and again while the only other answer takes longer than the patience."""
    prompts("a", ["[say:slow]", "[always:reset]"])
    server = serve(delay_s=0.1)
    recipe = recipe_on(server, patience_s=0.3, attempts=3, concurrency=2)
    (manifest,) = made(generate(recipe))
    assert manifest.outcomes == {"good": 1, "unanswered": 1}


def test_progress_tells_tokens_slots_time_and_cost(
    serve: Serve, recipe_on: MakeRecipe, prompts: Prompts, generate: Generate
) -> None:
    prompts("a", [f"Question {i}" for i in range(40)])
    seen: list[Progress] = []
    recipe = recipe_on(serve(delay_s=0.1), concurrency=4, price_completion_tokens=1e6, price_prompt_tokens=1e6)
    (manifest,) = made(generate(recipe, watch=Watch(on_progress=seen.append)))
    middle = next(progress for progress in seen if progress.share > 0.4)
    assert 0 < middle.in_flight <= 4
    assert middle.tokens_per_s > 0
    assert middle.eta_s
    assert middle.cost_estimate == pytest.approx(manifest.prompt_tokens + manifest.completion_tokens, rel=0.3)
    assert "in flight" in middle.text()
    assert "cost" in middle.text()
    assert [progress.share for progress in seen] == sorted(progress.share for progress in seen)


def test_two_servers_share_the_work(serve: Serve, recipe_on: MakeRecipe, prompts: Prompts, generate: Generate) -> None:
    prompts("a", [f"Question {i}" for i in range(60)])
    first, second = serve(delay_s=0.02), serve(delay_s=0.02)
    (manifest,) = made(generate(recipe_on(first, second, concurrency=4)))
    assert set(manifest.servers) == {first.url, second.url}
    assert min(first.seen.answers, second.seen.answers) > 20
    assert max(first.seen.most, second.seen.most) <= 4


def test_a_busy_server_is_not_overrun(
    serve: Serve, recipe_on: MakeRecipe, prompts: Prompts, generate: Generate
) -> None:
    """It bears 4 at once and says 429 to the rest: nothing is lost, and refusals stay few."""
    prompts("a", [f"Question {i}" for i in range(200)])
    server = serve(delay_s=0.02, slots=4)
    (manifest,) = made(generate(recipe_on(server, concurrency=64)))
    assert manifest.outcomes == {"good": 200}


def test_compressed_prompts_give_compressed_completions(
    serve: Serve, recipe_on: MakeRecipe, generate: Generate, stores: Stores
) -> None:
    import gzip

    import zstandard

    assert stores.prompts is not None
    body = b'{"prompt": "One?"}\n{"prompt": "Two?"}\nnonsense\n'
    stores.prompts.put("a.jsonl.gz", gzip.compress(body))
    stores.prompts.put("b.jsonl.zst", zstandard.compress(body))
    manifests = made(generate(recipe_on(serve())))
    assert [manifest.dropped for manifest in manifests] == [{"invalid JSON": 1}] * 2
    for key in ("a.jsonl.gz", "b.jsonl.zst"):
        packed = stores.source.get(key).body
        assert not packed.startswith(b"{")
        assert len(list(CompletionFile(packed, key))) == 2
