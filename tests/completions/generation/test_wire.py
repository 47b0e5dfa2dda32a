"""What a server's behaviour means, and that nothing is talked to, followed or told that must not be."""

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import SecretStr

from dflash_core.completions.generation.answers import Answer, Plan
from dflash_core.completions.generation.prompts import Prompt
from dflash_core.completions.generation.servers import NoAnswer, Servers
from dflash_core.completions.generation.wire import Connection, ServerRefuses, Trouble
from dflash_core.completions.record import Message
from dflash_core.errors import RecipeError
from dflash_core.recipe import Recipe
from dflash_core.storage.addresses import check_url, is_refused
from tests.chat_server import ChatServer

Serve = Callable[..., ChatServer]
MakeRecipe = Callable[..., Recipe]


def ask(recipe: Recipe, text: str, key: str | None = None) -> Answer:
    """One request, as generation sends it."""
    assert recipe.generation is not None
    plan = Plan(recipe.generation, 0, recipe.tokenization.template_options)
    prompt = Prompt(1, "1", (Message("user", text),), (), "hash")

    async def once() -> Answer:
        secret = None if key is None else SecretStr(key)
        connection = Connection(plan.generation.servers[0], plan.generation, secret)
        try:
            return await connection.ask(prompt, plan.first(prompt), plan)
        finally:
            await connection.close()

    return asyncio.run(once())


@pytest.mark.parametrize(
    ("mischief", "kind"),
    [("429", "overloaded"), ("503", "overloaded"), ("stall", "overloaded"), ("500", "failed"), ("reset", "failed"),
     ("half", "failed"), ("text", "failed"), ("list", "failed"), ("nochoice", "failed"), ("400", "refused")],
)  # fmt: skip
def test_trouble_has_a_kind(serve: Serve, recipe_on: MakeRecipe, mischief: str, kind: str) -> None:
    recipe = recipe_on(serve(), request_timeout_s=1.5 if mischief == "stall" else 60, token_ids=False)
    with pytest.raises(Trouble) as caught:
        ask(recipe, f"[always:{mischief}]")
    assert caught.value.kind == kind


def test_a_server_that_wants_to_be_left_alone_for_a_day_is_asked_again(
    recipe_on: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("limits", "servers"):
        monkeypatch.setattr(f"dflash_core.completions.generation.{module}.LONGEST_REST_S", 0.1)
    recipe = recipe_on("http://127.0.0.1:9/v1", total_timeout_s=20)
    assert recipe.generation is not None
    plan = Plan(recipe.generation, 0, {})
    prompt = Prompt(1, "1", (Message("user", "Hi?"),), (), "hash")
    good = Answer(
        content="Ho.", finish_reason="stop", prompt_tokens=1, completion_tokens=1, model="m", server="s", seconds=0.1
    )

    trouble = [Trouble("overloaded", "429", rest_s=86_400.0)]

    class Busy(Connection):
        async def ask(self, *_: object) -> Answer:
            if trouble:
                raise trouble.pop()
            return good

    async def ask() -> Answer | NoAnswer:
        servers = Servers([Busy(plan.generation.servers[0], plan.generation, None)], plan.generation)
        return await servers.ask(prompt, plan.first(prompt), plan)

    assert asyncio.run(ask()) == good


def test_a_redirect_is_not_followed(serve: Serve, recipe_on: MakeRecipe) -> None:
    with pytest.raises(ServerRefuses, match="redirects to http://elsewhere/v1, which is not followed"):
        ask(recipe_on(serve(), token_ids=False), "[always:302]")


def test_a_key_that_the_server_repeats_is_struck_out(serve: Serve, recipe_on: MakeRecipe) -> None:
    recipe = recipe_on(serve(key="sk-right"), token_ids=False)
    assert ask(recipe, "fine", "sk-right").content
    with pytest.raises(ServerRefuses) as caught:
        ask(recipe, "fine", "sk-wrong-secret")
    assert "sk-wrong-secret" not in str(caught.value)
    assert "***" in str(caught.value)
    assert caught.value.__cause__ is None


def test_the_environment_is_left_out(serve: Serve, recipe_on: MakeRecipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """No key, organisation, header or proxy gets to a server because it lies in the user's environment."""
    secrets = {"OPENAI_API_KEY": "sk-users", "OPENAI_ADMIN_KEY": "sk-admin", "OPENAI_ORG_ID": "org-users"}
    secrets |= {"OPENAI_PROJECT_ID": "proj-users", "OPENAI_CUSTOM_HEADERS": "X-Users: header-users"}
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    server = serve()
    ask(recipe_on(server, token_ids=False), "fine")
    (head,) = server.seen.headers
    for secret in ("sk-users", "sk-admin", "org-users", "proj-users", "header-users"):
        assert secret not in head


@pytest.mark.parametrize(
    "url",
    ["ftp://x/v1", "file:///etc", "http://", "169.254.169.254", "http://169.254.169.254/v1", "http://[fe80::1]/v1",
     "http://[::ffff:169.254.169.254]/v1", "http://[fd00:ec2::254]/", "http://100.100.100.200/", "http://me:pw@x/v1",
     "http://x/v1?key=1"],
)  # fmt: skip
def test_wrong_addresses_are_refused(url: str, recipe_on: MakeRecipe) -> None:
    with pytest.raises(RecipeError) as caught:
        check_url(url, "it")
    assert "pw" not in str(caught.value)
    with pytest.raises(RecipeError):
        ask(recipe_on(url), "fine")


@pytest.mark.parametrize(
    "address",
    [
        "169.254.169.254",
        "fe80::1%eth0",
        "224.0.0.1",
        "fd00:ec2::254",
        "64:ff9b::a9fe:a9fe",
        "::a9fe:a9fe",
        "::ffff:a9fe:a9fe",
    ],
)
def test_refused_addresses(address: str) -> None:
    assert is_refused(address)
    assert not is_refused("10.0.0.1")
    assert not any(map(is_refused, ("::1", "::", "64:ff9b::0a00:1")))


@pytest.mark.parametrize("host", ["metadata.example", "2852039166"])
def test_a_name_that_resolves_to_a_refused_address_is_refused(
    host: str, recipe_on: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checked where the connection is made, so that a name cannot change its mind in between."""
    real = socket.getaddrinfo

    def resolve(name: Any, port: Any, *rest: Any, **named: Any) -> Any:
        return real(
            "169.254.169.254" if name in ("metadata.example", b"metadata.example") else name, port, *rest, **named
        )

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    with pytest.raises(ServerRefuses, match=r"169\.254\.169\.254, a link-local"):
        ask(recipe_on(f"http://{host}/v1", token_ids=False), "fine")
