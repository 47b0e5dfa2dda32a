"""Every prompt once, in order, with all that it came from, whatever the server does and however often it is killed."""

import json
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from dflash_core.completions.completion import Completion
from dflash_core.completions.read import CompletionFile
from dflash_core.errors import StorageError
from dflash_core.generation.answered_file import open_answered_file
from dflash_core.generation.answers import Answer, plan_of
from dflash_core.generation.generate import FileGenerated, FileNotGenerated, FileOutcome, GenerationWatch, list_prompts
from dflash_core.generation.progress import GenerationProgress
from dflash_core.generation.servers import ServersGone
from dflash_core.records import GeneratedFile, Reject, StoredObject
from dflash_core.storage.layout import GeneratedKeys
from dflash_core.storage.s3 import Store
from dflash_core.workspace import Workspace
from tests.chat_server import ChatServer, answer_to

Serve = Callable[..., ChatServer]
MakeWorkspace = Callable[..., Workspace]
Prompts = Callable[[str, list[str]], None]
Generate = Callable[..., list[FileOutcome]]


def rows_of(workspace: Workspace, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in workspace.source.get(f"{name}.jsonl").body.splitlines()]


def made(outcomes: list[FileOutcome]) -> list[GeneratedFile]:
    assert all(isinstance(outcome, FileGenerated) for outcome in outcomes), outcomes
    return [outcome.manifest for outcome in outcomes if isinstance(outcome, FileGenerated)]


def reason_of(outcomes: list[FileOutcome]) -> str:
    (outcome,) = outcomes
    assert isinstance(outcome, FileNotGenerated)
    return outcome.reason


def rejects_of(workspace: Workspace, manifest: GeneratedFile) -> list[Reject]:
    return [Reject.model_validate_json(line) for line in workspace.derived.read(manifest.rejects).splitlines()]


def test_every_prompt_becomes_a_row_in_input_order(
    serve: Serve, workspace_on: MakeWorkspace, prompts: Prompts, generate: Generate, workspace: Workspace
) -> None:
    """Answers come in another order: every third is slow."""
    texts = [f"Question {i}{' [fast]' if i % 3 else ''}?" for i in range(40)]
    prompts("a", texts)
    prompts("b", texts[:7])
    manifests = made(generate(workspace_on(serve(delay_s=0.05), concurrency=8)))
    assert {manifest.partition: manifest.written for manifest in manifests} == {"a": 40, "b": 7}
    rows = rows_of(workspace, "a")
    assert [row["messages"][-1]["content"] for row in rows] == [answer_to(text) for text in texts]
    assert [(row["id"], row["prompt_line"]) for row in rows] == [(f"a-{i}", i + 1) for i in range(40)]
    completions = list(CompletionFile(workspace.source.get("a.jsonl").body, "a"))
    assert all(isinstance(one, Completion) and one.messages[-1].reasoning for one in completions)


def test_a_row_tells_all_that_it_came_from(
    serve: Serve, workspace_on: MakeWorkspace, prompts: Prompts, generate: Generate, workspace: Workspace
) -> None:
    prompts("a", ["One?"])
    server = serve(token_ids=True, reasoning_field="reasoning")
    generate(workspace_on(server))
    (row,) = rows_of(workspace, "a")
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
    serve: Serve, workspace_on: MakeWorkspace, generate: Generate, workspace: Workspace
) -> None:
    """A prompt with a tool's result in it, and an answer that calls a tool."""
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    call = {"id": "c0", "type": "function", "function": {"name": "add", "arguments": {"a": 0}}}
    messages = [
        {"role": "user", "content": "Add."},
        {"role": "assistant", "content": "", "reasoning": "I call.", "tool_calls": [call]},
        {"role": "tool", "content": "0 [say:call]", "tool_call_id": "c0"},
    ]
    assert workspace.prompts is not None
    workspace.prompts.put("a.jsonl", json.dumps({"messages": messages, "tools": tools}).encode())
    server = serve()
    made(generate(workspace_on(server)))
    body = server.seen.bodies[-1]
    assert body["tools"] == tools
    sent = body["messages"]
    assert isinstance(sent, list)
    assert sent[1]["tool_calls"][0]["function"]["arguments"] == '{"a": 0}'
    assert (sent[1]["reasoning_content"], sent[2]["tool_call_id"]) == ("I call.", "c0")
    _, completion = CompletionFile(workspace.source.get("a.jsonl").body, "a")  # a row for each of the two answers
    assert isinstance(completion, Completion)
    assert completion.finish_reason == "tool_calls"
    assert completion.tools == tuple(tools)
    assert completion.messages[-1].tool_calls[0]["function"] == {"name": "add", "arguments": {"a": 1}}


def test_prompts_that_end_with_an_answer(
    serve: Serve, workspace_on: MakeWorkspace, generate: Generate, workspace: Workspace
) -> None:
    """Rejected, unless the recipe says that the answers shall be made again."""
    messages = [{"role": "user", "content": "One?"}, {"role": "assistant", "content": "OK."}]
    lines = [{"messages": messages}, {"prompt": "Two?"}, {"messages": []}, {"messages": messages[1:]}]
    assert workspace.prompts is not None
    workspace.prompts.put("a.jsonl", "\n".join(map(json.dumps, lines)).encode())
    server = serve()
    (manifest,) = made(generate(workspace_on(server)))
    assert manifest.dropped == {"prompt with an answer": 2, "empty conversation": 1}
    (manifest,) = made(generate(workspace_on(server, answers_in_prompts="replace")))
    assert manifest.dropped == {"empty conversation": 1, "no prompt": 1}
    assert [row["messages"][-1]["content"] for row in rows_of(workspace, "a")] == [answer_to("One?"), answer_to("Two?")]


MISCHIEF = ("429", "500", "503", "reset", "half", "text", "list", "nochoice", "stall")


def test_trouble_that_passes_costs_no_row(
    serve: Serve, workspace_on: MakeWorkspace, prompts: Prompts, generate: Generate, workspace: Workspace
) -> None:
    texts = [f"{i} [once:{MISCHIEF[i % len(MISCHIEF)]}]" for i in range(18)] + ["calm"]
    prompts("a", texts)
    server = serve()
    (manifest,) = made(generate(workspace_on(server, request_timeout_s=4, concurrency=32)))
    assert manifest.outcomes == {"good": 19}
    assert [row["messages"][-1]["content"] for row in rows_of(workspace, "a")] == [answer_to(text) for text in texts]
    assert all(server.seen.requests[text] == 2 for text in texts[1:18]), server.seen.requests


def test_bad_answers_are_counted_and_named(
    serve: Serve, workspace_on: MakeWorkspace, prompts: Prompts, generate: Generate, workspace: Workspace
) -> None:
    """Lines = written + dropped, by reason; one bad prompt stops nothing; what was refused is asked again next time."""
    bad = ["[say:length]", "[say:thought]", "[say:empty]", "[say:loop]", "[say:filter]", "[always:400]", "[always:500]"]
    texts = [*bad, "same", "same", *(f"good {i}" for i in range(20))]
    prompts("a", texts)
    server = serve()
    asking = workspace_on(server, attempts=2, sampling={"max_tokens": 64, "seed": False})
    (manifest,) = made(generate(asking))
    assert manifest.outcomes == {
        "good": 21, "truncated": 2, "refused": 2, "empty": 1, "loop": 1, "unanswered": 1, "duplicate": 1,
    }  # fmt: skip
    assert manifest.cut_in_thought == 1
    assert manifest.dropped == {"refused": 2, "empty": 1, "loop": 1, "unanswered": 1, "duplicate": 1}
    assert manifest.lines == manifest.written + sum(manifest.dropped.values())
    rejects = {reject.line: reject for reject in rejects_of(workspace, manifest)}
    assert sorted(rejects) == [3, 4, 5, 6, 7, 9]
    assert "mischief 400" in rejects[6].detail
    assert "2 tries failed" in rejects[7].detail
    before = server.seen.requests.copy()
    generate(asking)
    asked = {text for text in server.seen.requests - before if text in texts[1:]}
    assert asked == {"[always:400]", "[always:500]", "[say:filter]"}


def test_a_prompt_has_a_total_time(
    serve: Serve, workspace_on: MakeWorkspace, prompts: Prompts, generate: Generate, workspace: Workspace
) -> None:
    """A server that takes a request and never answers it does not hold the others up."""
    prompts("a", ["[always:stall]", "Hi?"])
    (manifest,) = made(generate(workspace_on(serve(), request_timeout_s=1.5, total_timeout_s=4)))
    assert manifest.outcomes == {"good": 1, "unanswered": 1}
    (reject,) = rejects_of(workspace, manifest)
    assert "no answer within 4 s" in reject.detail


def test_a_truncated_answer_may_take_more_tokens(
    serve: Serve, workspace_on: MakeWorkspace, prompts: Prompts, generate: Generate, workspace: Workspace
) -> None:
    prompts("a", ["[say:length]", "[say:thought]", "fine"])
    (manifest,) = made(generate(workspace_on(serve(), outcomes={"truncated": "retry", "max_bad_share": 1.0})))
    assert manifest.outcomes == {"good": 2, "truncated": 1}
    assert manifest.dropped == {"truncated": 1}
    assert [row["sampling"]["max_tokens"] for row in rows_of(workspace, "a")] == [128, 64]


def test_a_hopeless_file_is_given_up_early(
    serve: Serve, workspace_on: MakeWorkspace, prompts: Prompts, generate: Generate, workspace: Workspace
) -> None:
    """87 % of the answers are empty: a few are enough to know."""
    prompts("a", [f"{i} {'[say:empty]' if i % 8 else ''}" for i in range(400)])
    prompts("b", ["fine"])
    server = serve(delay_s=0.01)
    outcomes = generate(workspace_on(server, concurrency=4, outcomes={"empty": "drop", "enough_answers": 16}))
    failed = [outcome for outcome in outcomes if isinstance(outcome, FileNotGenerated)]
    assert len(failed) == 1
    assert "given up" in failed[0].reason
    assert "empty" in failed[0].reason
    assert server.seen.answers < 60
    assert [key for key, _, _ in workspace.source.list()] == ["b.jsonl"]


def test_what_was_answered_is_not_asked_again(
    serve: Serve, workspace_on: MakeWorkspace, prompts: Prompts, generate: Generate, workspace: Workspace
) -> None:
    """The ledger knows content, not line numbers; a valid file costs nothing at all; `anew` forgets."""
    prompts("a", [f"Question {i}" for i in range(10)])
    server = serve()
    asking = workspace_on(server)
    generate(asking)
    first = workspace.source.get("a.jsonl").body
    seen = server.seen.answers
    (again,) = generate(asking)
    assert isinstance(again, FileGenerated)
    assert again.skipped
    assert server.seen.answers == seen
    prompts("a", ["New", *(f"Question {i}" for i in reversed(range(10)))])
    (manifest,) = made(generate(asking))
    assert manifest.asked == 1
    assert [row["messages"][-1]["content"] for row in rows_of(workspace, "a")][-1] == answer_to("Question 0")
    (manifest,) = made(generate(asking, anew=True))
    assert manifest.asked == 11
    prompts("a", [f"Question {i}" for i in range(10)])
    generate(asking)
    assert workspace.source.get("a.jsonl").body == first


@pytest.mark.parametrize(
    "change",
    [{"model": "other"}, {"sampling": {"max_tokens": 64, "temperature": 0.6}}, {"sampling": {"max_tokens": 65}}],
)
def test_a_changed_request_is_a_new_key(
    serve: Serve, workspace_on: MakeWorkspace, prompts: Prompts, generate: Generate, change: dict[str, Any]
) -> None:
    prompts("a", ["One", "Two"])
    generate(workspace_on(serve()))
    server = serve(model=change.get("model", "tiny"))
    (manifest,) = made(generate(workspace_on(server, **change)))
    assert manifest.asked == 2


def test_a_changed_policy_asks_nothing(
    serve: Serve, workspace_on: MakeWorkspace, prompts: Prompts, generate: Generate
) -> None:
    prompts("a", ["One", "Two", "[say:length]"])
    server = serve()
    (kept,) = made(generate(workspace_on(server)))
    (dropped,) = made(generate(workspace_on(server, outcomes={"truncated": "drop"})))
    assert (kept.written, dropped.written, dropped.asked) == (3, 2, 0)


def test_a_foreign_file_is_left_alone(
    serve: Serve, workspace_on: MakeWorkspace, prompts: Prompts, generate: Generate, workspace: Workspace
) -> None:
    prompts("a", ["One"])
    workspace.source.put("a.jsonl", b"precious\n")
    server = serve()
    assert "was not generated" in reason_of(generate(workspace_on(server)))
    assert server.seen.answers == 0
    assert workspace.source.get("a.jsonl").body == b"precious\n"
    made(generate(workspace_on(server, overwrite=True)))
    assert len(rows_of(workspace, "a")) == 1


def test_servers_that_are_gone_end_it_with_what_was_answered_kept(
    serve: Serve, workspace_on: MakeWorkspace, prompts: Prompts, generate: Generate, workspace: Workspace
) -> None:
    prompts("a", [f"Question {i}{' [always:reset]' if i > 20 else ''}" for i in range(60)])
    server = serve()
    with pytest.raises(ServersGone, match="no server has answered for"):
        generate(workspace_on(server, patience_s=1, attempts=100, concurrency=4))
    keys = [key for key, _, _ in workspace.derived.list("generated_completions/a/")]
    assert sum(len(workspace.derived.get(key).body.splitlines()) for key in keys) == 21


def test_a_long_answer_outlasts_the_patience_with_others(
    serve: Serve, workspace_on: MakeWorkspace, prompts: Prompts, generate: Generate
) -> None:
    """One prompt is reset again and again while the only other answer takes longer than the patience."""
    prompts("a", ["[say:slow]", "[always:reset]"])
    server = serve(delay_s=0.1)
    asking = workspace_on(server, patience_s=0.3, attempts=3, concurrency=2)
    (manifest,) = made(generate(asking))
    assert manifest.outcomes == {"good": 1, "unanswered": 1}


def test_progress_tells_tokens_slots_time_and_cost(
    serve: Serve, workspace_on: MakeWorkspace, prompts: Prompts, generate: Generate
) -> None:
    prompts("a", [f"Question {i}" for i in range(32)])
    seen: list[GenerationProgress] = []
    asking = workspace_on(serve(delay_s=0.3), concurrency=4, price_completion_tokens=1e6, price_prompt_tokens=1e6)
    (manifest,) = made(generate(asking, watch=GenerationWatch(on_progress=seen.append)))
    middle = next(progress for progress in seen if progress.share > 0.4)
    assert 0 < middle.in_flight <= 4
    assert middle.tokens_per_s > 0
    assert middle.eta_s
    assert middle.cost_estimate == pytest.approx(manifest.prompt_tokens + manifest.completion_tokens, rel=0.3)
    assert "in flight" in middle.text()
    assert "cost" in middle.text()
    assert [progress.share for progress in seen] == sorted(progress.share for progress in seen)


def test_two_servers_share_the_work(
    serve: Serve, workspace_on: MakeWorkspace, prompts: Prompts, generate: Generate
) -> None:
    prompts("a", [f"Question {i}" for i in range(60)])
    first, second = serve(delay_s=0.05), serve(delay_s=0.05)
    (manifest,) = made(generate(workspace_on(first, second, concurrency=4)))
    assert set(manifest.servers) == {first.url, second.url}
    assert min(first.seen.answers, second.seen.answers) > 10
    assert max(first.seen.most, second.seen.most) <= 4


def test_a_busy_server_is_not_overrun(
    serve: Serve, workspace_on: MakeWorkspace, prompts: Prompts, generate: Generate
) -> None:
    """It bears 4 at once and says 429 to the rest: nothing is lost, and refusals stay few."""
    prompts("a", [f"Question {i}" for i in range(300)])
    server = serve(delay_s=0.02, slots=4)
    (manifest,) = made(generate(workspace_on(server, concurrency=64)))
    assert manifest.outcomes == {"good": 300}
    assert 0 < server.seen.busy < 110


def test_another_process_that_was_first_with_a_worse_answer_is_asked_on(
    serve: Serve,
    workspace_on: MakeWorkspace,
    prompts: Prompts,
    generate: Generate,
    workspace: Workspace,
    tmp_path: Path,
) -> None:
    """First committed answer wins; if that is one to ask again after, the file is not finished without."""
    prompts("a", ["One?", "Two?"])
    asking = workspace_on(serve(delay_s=1), commit_every_s=1000)
    plan, (source,) = plan_of(asking.recipe), list_prompts(asking)
    other = open_answered_file(source, plan, workspace, tmp_path, anew=False)
    first, _ = (request for _, request in other.pending())
    empty = Answer(
        content="", finish_reason="stop", prompt_tokens=1, completion_tokens=1, model="tiny", server="x", seconds=1.0
    )
    other.ledger.add(first.key, empty)
    committed: list[bool] = []

    def commit(progress: GenerationProgress) -> None:
        if progress.in_flight and not committed:
            committed.append(True)
            other.ledger.commit()

    (manifest,) = made(generate(asking, watch=GenerationWatch(on_progress=commit)))
    assert committed
    assert manifest.outcomes == {"good": 2}
    assert manifest.asked == 3
    assert [row["messages"][-1]["content"] for row in rows_of(workspace, "a")] == [answer_to("One?"), answer_to("Two?")]


def test_files_beyond_the_cap_are_refused_with_a_sentence(
    serve: Serve,
    workspace_on: MakeWorkspace,
    prompts: Prompts,
    generate: Generate,
    workspace: Workspace,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of prompts before they are read, of completions before they are written."""
    prompts("a", ["One?"])
    asking = workspace_on(serve())
    (size,) = (size for _, size, _ in workspace.prompts.list())  # type: ignore[union-attr]
    for most, what in ((size - 1, f"/prompts/a.jsonl has {size} bytes"), (size, "what s3://.*/a.jsonl became has")):
        monkeypatch.setattr("dflash_core.completions.read.MAX_OBJECT_BYTES", most)
        assert re.search(rf"{what}.*more than the {most} of one file; split it", reason_of(generate(asking)))
    assert list(workspace.source.list()) == []


def test_compressed_prompts_give_compressed_completions(
    serve: Serve, workspace_on: MakeWorkspace, generate: Generate, workspace: Workspace
) -> None:
    import gzip

    import zstandard

    assert workspace.prompts is not None
    body = b'{"prompt": "One?"}\n{"prompt": "Two?"}\nnonsense\n'
    workspace.prompts.put("a.jsonl.gz", gzip.compress(body))
    workspace.prompts.put("b.jsonl.zst", zstandard.compress(body))
    manifests = made(generate(workspace_on(serve())))
    assert [manifest.dropped for manifest in manifests] == [{"invalid JSON": 1}] * 2
    for key in ("a.jsonl.gz", "b.jsonl.zst"):
        packed = workspace.source.get(key).body
        assert not packed.startswith(b"{")
        assert len(list(CompletionFile(packed, key))) == 2


def test_an_end_between_the_file_and_its_manifest_locks_nothing(
    serve: Serve,
    workspace_on: MakeWorkspace,
    prompts: Prompts,
    generate: Generate,
    workspace: Workspace,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For a new file, and for one made with new parameters in the place of an old one; then the same goes on."""
    prompts("a", ["One", "Two", "[always:400]"])
    server = serve()

    def fail(store: Store, key: str, record: object) -> StoredObject:
        raise StorageError("power cut")

    for temperature in (0.5, 0.6):
        asking = workspace_on(server, sampling={"max_tokens": 64, "temperature": temperature})
        with monkeypatch.context() as patch:
            patch.setattr(Store, "put_record", fail)
            for _ in range(2):
                assert "power cut" in reason_of(generate(asking))
        assert {row["sampling"]["temperature"] for row in rows_of(workspace, "a")} == {temperature}
        (manifest,) = made(generate(asking))
        assert manifest.outcomes == {"good": 2, "refused": 1}
        assert workspace.source.holds(manifest.completions)


def test_storage_that_fails_for_a_while_costs_no_answer(
    serve: Serve, workspace_on: MakeWorkspace, prompts: Prompts, generate: Generate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when the last answers of a file are committed; and what is lost for good is told."""
    prompts("a", ["One", "Two"])
    server, real, failures = serve(), Store.create, 3

    def create(store: Store, key: str, body: bytes) -> bool:
        nonlocal failures
        failures -= 1
        if failures >= 0:
            raise StorageError("out of order")
        return real(store, key, body)

    monkeypatch.setattr(Store, "create", create)
    (manifest,) = made(generate(workspace_on(server)))
    assert (manifest.written, manifest.asked) == (2, 2)
    failures, notes = 1_000_000, list[str]()
    asking = workspace_on(server, patience_s=0.2, commit_every_s=0.5, model="tiny", sampling={"max_tokens": 65})
    with suppress(StorageError):
        generate(asking, watch=GenerationWatch(on_note=notes.append))
    assert any("are lost: out of order" in note for note in notes), notes


def test_servers_that_accept_and_never_answer_end_it(
    serve: Serve, workspace_on: MakeWorkspace, prompts: Prompts, generate: Generate
) -> None:
    prompts("a", ["Hi?", *(f"{i} [always:stall]" for i in range(200))])
    outcomes = {"max_bad_share": 1.0}
    times = {"request_timeout_s": 1.5, "total_timeout_s": 3, "patience_s": 1}
    with pytest.raises(ServersGone, match="no server has answered for"):
        generate(workspace_on(serve(), concurrency=4, outcomes=outcomes, **times))


def test_more_rejects_than_can_be_kept_are_refused(
    generate: Generate, workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dflash_core.completions.read.MAX_REJECTS", 5)
    assert workspace.prompts is not None
    workspace.prompts.put("a.jsonl", b"\n" * 6 + b'{"prompt": "One?"}\n')
    reason = reason_of(generate(workspace))
    assert "more than 5 of its lines are rejected, the last at line 6" in reason


def test_a_kill_while_answers_are_forgotten_leaves_no_later_ones(
    prompts: Prompts, workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ledger is read up to its first gap: segments behind one would stay and be in the way."""
    prompts("a", ["One?"])
    (source,), plan = list_prompts(workspace), plan_of(workspace.recipe)
    prefix = GeneratedKeys("a").ledger(plan.request_hash)
    assert prefix == f"generated_completions/a/{plan.request_hash}/"
    delete = Store.delete
    for number in range(3):
        workspace.derived.put(f"{prefix}{number:06d}.jsonl", b"")

    def deleted(store: Store, key: str) -> None:
        delete(store, key)
        raise StorageError("killed")

    monkeypatch.setattr(Store, "delete", deleted)
    with pytest.raises(StorageError):
        open_answered_file(source, plan, workspace, tmp_path, anew=True)
    assert [key for key, _, _ in workspace.derived.list(prefix)] == [f"{prefix}{n:06d}.jsonl" for n in range(2)]
