"""A server that does not fit the recipe is refused before anything is asked of it."""

from collections.abc import Callable
from typing import Any

import pytest

from dflash_core.completions.generation.generate import FileGenerated, FileOutcome, Watch
from dflash_core.completions.generation.wire import ServerRefuses
from dflash_core.recipe import Recipe
from tests.chat_server import ChatServer

Serve = Callable[..., ChatServer]
MakeRecipe = Callable[..., Recipe]
Prompts = Callable[[str, list[str]], None]
Generate = Callable[..., list[FileOutcome]]


@pytest.mark.parametrize(
    ("behaviour", "sentence"),
    [
        ({"model": "another"}, "does not serve 'tiny' but another"),
        ({"extra_tokens": 3}, "renders prompts differently: a prompt has"),
        ({"extra_tokens": 3, "token_ids": True}, "renders prompts differently: from token"),
        ({"room": 66}, "has room for 66 tokens, but the first prompt has 3 and generation.sampling.max_tokens is 64"),
    ],
)
def test_what_does_not_fit_is_told(
    serve: Serve,
    recipe_on: MakeRecipe,
    prompts: Prompts,
    generate: Generate,
    behaviour: dict[str, Any],
    sentence: str,
) -> None:
    prompts("a", ["Hi?"])
    server = serve(**behaviour)
    with pytest.raises(ServerRefuses, match=sentence):
        generate(recipe_on(server))
    assert server.seen.requests["Hi?"] == 0


def test_nobody_there_is_told(recipe_on: MakeRecipe, prompts: Prompts, generate: Generate) -> None:
    prompts("a", ["Hi?"])
    with pytest.raises(ServerRefuses, match=r"http://127\.0\.0\.1:9/v1 cannot be used: .*Connect"):
        generate(recipe_on("http://127.0.0.1:9/v1"))


def test_token_ids_are_done_without_where_the_server_refuses_them(
    serve: Serve, recipe_on: MakeRecipe, prompts: Prompts, generate: Generate
) -> None:
    prompts("a", ["Hi?"])
    server = serve(token_ids=False)
    (outcome,) = generate(recipe_on(server))
    assert isinstance(outcome, FileGenerated)
    assert not any("return_token_ids" in body for body in server.seen.bodies)


def test_a_first_prompt_that_is_refused_does_not_stop_the_others(
    serve: Serve, recipe_on: MakeRecipe, prompts: Prompts, generate: Generate
) -> None:
    prompts("a", ["[never:answered] [always:400]", "Hi?", "Ho?"])
    notes: list[str] = []
    (outcome,) = generate(recipe_on(serve()), watch=Watch(on_note=notes.append))
    assert isinstance(outcome, FileGenerated)
    assert outcome.manifest.outcomes == {"good": 2, "refused": 1}


def test_what_is_asked_is_what_the_recipe_says(
    serve: Serve, recipe_on: MakeRecipe, prompts: Prompts, generate: Generate
) -> None:
    prompts("a", ["Hi?"])
    server = serve()
    recipe = recipe_on(server, sampling={"max_tokens": 64, "top_p": 0.9, "top_k": 20})
    options = {"tokenization": recipe.tokenization.model_copy(update={"template_options": {"enable_thinking": True}})}
    generate(recipe.model_copy(update=options))
    body = server.seen.bodies[-1]
    assert (body["top_p"], body["top_k"], body["stream"]) == (0.9, 20, False)
    assert body["chat_template_kwargs"] == {"enable_thinking": True}
    assert "temperature" not in body
