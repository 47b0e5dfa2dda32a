"""A server that does not fit the recipe is refused before anything is asked of it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from dflash_core.completions.completion import Rejected
from dflash_core.generation.client import ServerRefuses
from dflash_core.generation.generate import FileGenerated, FileOutcome, GenerationWatch, generate_files, list_prompts
from dflash_core.generation.prompt_file import Prompt
from dflash_core.generation.server_check import PROBE
from dflash_core.workspace import Workspace
from tests.chat_server import ChatServer
from tests.generation.conftest import ids_of

Serve = Callable[..., ChatServer]
MakeWorkspace = Callable[..., Workspace]
Prompts = Callable[[str, list[str]], None]
Generate = Callable[..., list[FileOutcome]]


@pytest.mark.parametrize(
    ("behaviour", "sentence"),
    [
        ({"model": "another"}, "does not serve 'tiny' but another"),
        ({"extra_tokens": 3}, "renders prompts differently: a prompt has"),
        ({"extra_tokens": 3, "token_ids": True}, "renders prompts differently: from token"),
        (
            {"room": 66},
            r"has room for 66 tokens, but a short question has \d+ and generation.sampling.max_tokens is 64",
        ),
    ],
)
def test_what_does_not_fit_is_told(
    serve: Serve,
    workspace_on: MakeWorkspace,
    prompts: Prompts,
    generate: Generate,
    behaviour: dict[str, Any],
    sentence: str,
) -> None:
    prompts("a", ["Hi?"])
    server = serve(**behaviour)
    with pytest.raises(ServerRefuses, match=sentence):
        generate(workspace_on(server))
    assert server.seen.requests["Hi?"] == 0


def test_nobody_there_is_told(workspace_on: MakeWorkspace, prompts: Prompts, generate: Generate) -> None:
    prompts("a", ["Hi?"])
    with pytest.raises(ServerRefuses, match=r"http://127\.0\.0\.1:9/v1 cannot be used: .*Connect"):
        generate(workspace_on("http://127.0.0.1:9/v1"))


def test_token_ids_are_done_without_where_the_server_refuses_them(
    serve: Serve, workspace_on: MakeWorkspace, prompts: Prompts, generate: Generate
) -> None:
    prompts("a", ["Hi?"])
    server = serve(token_ids=False)
    (outcome,) = generate(workspace_on(server))
    assert isinstance(outcome, FileGenerated)
    assert not any("return_token_ids" in body for body in server.seen.bodies)


def test_token_ids_are_done_without_where_the_server_refuses_them_later(
    serve: Serve, workspace_on: MakeWorkspace, prompts: Prompts, generate: Generate
) -> None:
    """Another server may stand behind the same address from one request to the next."""
    prompts("a", ["Hi?", "Ho?"])
    (outcome,) = generate(workspace_on(serve(token_ids="probe")))
    assert isinstance(outcome, FileGenerated)
    assert outcome.manifest.outcomes == {"good": 2}


def test_a_first_prompt_that_is_refused_does_not_stop_the_others(
    serve: Serve, workspace_on: MakeWorkspace, prompts: Prompts, generate: Generate
) -> None:
    prompts("a", ["[never:answered] [always:400]", "Hi?", "Ho?"])
    notes: list[str] = []
    (outcome,) = generate(workspace_on(serve()), watch=GenerationWatch(on_note=notes.append))
    assert isinstance(outcome, FileGenerated)
    assert outcome.manifest.outcomes == {"good": 2, "refused": 1}


def test_what_is_asked_is_what_the_recipe_says(
    serve: Serve, workspace_on: MakeWorkspace, prompts: Prompts, generate: Generate
) -> None:
    prompts("a", ["Hi?"])
    server = serve()
    asking = workspace_on(server, sampling={"max_tokens": 64, "top_p": 0.9, "top_k": 20})
    options = {
        "tokenization": asking.recipe.tokenization.model_copy(update={"template_options": {"enable_thinking": True}})
    }
    generate(replace(asking, recipe=asking.recipe.model_copy(update=options)))
    body = server.seen.bodies[-1]
    assert (body["top_p"], body["top_k"], body["stream"]) == (0.9, 20, False)
    assert body["chat_template_kwargs"] == {"enable_thinking": True}
    assert "temperature" not in body


def test_a_first_prompt_that_is_too_long_is_refused_for_itself(
    serve: Serve, workspace_on: MakeWorkspace, prompts: Prompts, generate: Generate
) -> None:
    """The server has room for the others; nothing is kept of a refused prompt, so it comes first in every run."""
    prompts("a", ["[refused]" + "long " * 100, "Hi?", "Ho?"])
    asking = workspace_on(serve(room=200))
    for _ in range(2):
        (outcome,) = generate(asking)
        assert isinstance(outcome, FileGenerated)
        assert outcome.manifest.outcomes == {"good": 2, "refused": 1}


def test_a_first_prompt_that_is_refused_does_not_cost_the_token_ids(
    serve: Serve, workspace_on: MakeWorkspace, prompts: Prompts, generate: Generate
) -> None:
    prompts("a", ["[refused]", "Hi?", "Ho?"])
    server = serve(token_ids=True)
    generate(workspace_on(server))
    asked = [body for body in server.seen.bodies if body["messages"][-1]["content"] in ("Hi?", "Ho?")]  # type: ignore[index]
    assert [body.get("return_token_ids") for body in asked] == [True, True]


def test_a_template_that_refuses_the_probe_is_a_note(
    serve: Serve, workspace_on: MakeWorkspace, prompts: Prompts
) -> None:
    """Some templates demand a system message."""

    def demanding(prompt: Prompt) -> list[int]:
        if prompt is PROBE:
            raise Rejected("template", "a system message is needed")
        return ids_of(prompt)

    prompts("a", ["Hi?"])
    notes: list[str] = []
    asking = workspace_on(serve())
    (outcome,) = generate_files(asking, list_prompts(asking), demanding, watch=GenerationWatch(on_note=notes.append))
    assert isinstance(outcome, FileGenerated)
    assert any("refuses a lone question" in note for note in notes)
