"""What a server's behaviour means, and that nothing is talked to, followed or told that must not be."""

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import SecretStr

from dflash_core.completions.completion import Message
from dflash_core.errors import RecipeError
from dflash_core.generation.answers import Answer, plan_of
from dflash_core.generation.client import ServerConnection, ServerRefuses, Trouble
from dflash_core.generation.prompt_file import Prompt
from dflash_core.http import check_url
from dflash_core.workspace import Workspace
from tests.chat_server import ChatServer

Serve = Callable[..., ChatServer]
MakeWorkspace = Callable[..., Workspace]


def ask(workspace: Workspace, text: str, key: str | None = None) -> Answer:
    """One request, as generation sends it."""
    plan = plan_of(workspace.recipe)
    prompt = Prompt(1, "1", (Message("user", text),), (), "hash")

    async def once() -> Answer:
        secret = None if key is None else SecretStr(key)
        connection = ServerConnection(plan.generation.servers[0], plan.generation, secret)
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
def test_trouble_has_a_kind(serve: Serve, workspace_on: MakeWorkspace, mischief: str, kind: str) -> None:
    asking = workspace_on(serve(), request_timeout_s=1.5 if mischief == "stall" else 60, token_ids=False)
    with pytest.raises(Trouble) as caught:
        ask(asking, f"[always:{mischief}]")
    assert caught.value.kind == kind


def test_a_redirect_is_not_followed(serve: Serve, workspace_on: MakeWorkspace) -> None:
    with pytest.raises(ServerRefuses, match="redirects to http://elsewhere/v1, which is not followed"):
        ask(workspace_on(serve(), token_ids=False), "[always:302]")


def test_a_key_that_the_server_repeats_is_struck_out(serve: Serve, workspace_on: MakeWorkspace) -> None:
    asking = workspace_on(serve(key="sk-right"), token_ids=False)
    assert ask(asking, "fine", "sk-right").content
    with pytest.raises(ServerRefuses) as caught:
        ask(asking, "fine", "sk-wrong-secret")
    assert "sk-wrong-secret" not in str(caught.value)
    assert "***" in str(caught.value)
    assert caught.value.__cause__ is None


def test_the_environment_is_left_out(
    serve: Serve, workspace_on: MakeWorkspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No key, organisation, header or proxy gets to a server because it lies in the user's environment."""
    secrets = {"OPENAI_API_KEY": "sk-users", "OPENAI_ADMIN_KEY": "sk-admin", "OPENAI_ORG_ID": "org-users"}
    secrets |= {"OPENAI_PROJECT_ID": "proj-users", "OPENAI_CUSTOM_HEADERS": "X-Users: header-users"}
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    server = serve()
    ask(workspace_on(server, token_ids=False), "fine")
    (head,) = server.seen.headers
    for secret in ("sk-users", "sk-admin", "org-users", "proj-users", "header-users"):
        assert secret not in head


@pytest.mark.parametrize(
    "url",
    ["ftp://x/v1", "file:///etc", "http://", "169.254.169.254", "http://169.254.169.254/v1", "http://[fe80::1]/v1",
     "http://[::ffff:169.254.169.254]/v1", "http://[fd00:ec2::254]/", "http://100.100.100.200/", "http://me:pw@x/v1",
     "http://x/v1?key=1"],
)  # fmt: skip
def test_wrong_addresses_are_refused(url: str, workspace_on: MakeWorkspace) -> None:
    with pytest.raises(RecipeError) as caught:
        check_url(url, "it")
    assert "pw" not in str(caught.value)
    with pytest.raises(RecipeError):
        ask(workspace_on(url), "fine")


@pytest.mark.parametrize("host", ["metadata.example", "2852039166"])
def test_a_name_that_resolves_to_a_refused_address_is_refused(
    host: str, workspace_on: MakeWorkspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checked where the connection is made, so that a name cannot change its mind in between."""
    real = socket.getaddrinfo

    def resolve(name: Any, port: Any, *rest: Any, **named: Any) -> Any:
        return real(
            "169.254.169.254" if name in ("metadata.example", b"metadata.example") else name, port, *rest, **named
        )

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    with pytest.raises(ServerRefuses, match=r"169\.254\.169\.254, a link-local"):
        ask(workspace_on(f"http://{host}/v1", token_ids=False), "fine")
