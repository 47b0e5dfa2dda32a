"""A recipe with a [generation] section on a fresh bucket, prompts in it, and a server that can misbehave."""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dflash_core.generation.generate import UNWATCHED, FileOutcome, generate_files, list_prompts
from dflash_core.generation.prompt_file import Prompt
from dflash_core.recipe import Recipe
from dflash_core.workspace import Workspace, connect
from tests.chat_server import Behaviour, ChatServer, running

MakeWorkspace = Callable[..., Workspace]
Generate = Callable[..., list[FileOutcome]]


def ids_of(prompt: Prompt) -> list[int]:
    """The server's tokens are characters."""
    return [ord(c) for c in prompt.messages[-1].content]


@pytest.fixture
def serve() -> Iterator[Callable[..., ChatServer]]:
    """Start a server with this behaviour."""
    with ExitStack() as stack:
        yield lambda **behaviour: stack.enter_context(running(Behaviour(**behaviour)))


@pytest.fixture
def workspace(bucket: str, tmp_path: Path) -> Workspace:
    """One whose server is not there."""
    table = {
        "name": "test",
        "source": {"bucket": bucket, "prefix": "completions/"},
        "storage": {"bucket": bucket, "prefix": "derived/", "work_dir": tmp_path / "work"},
        "target": {"path": tmp_path},
        "generation": {
            "prompts": {"bucket": bucket, "prefix": "prompts/"},
            "servers": ["http://127.0.0.1:9/v1"],
            "model": "tiny",
            "sampling": {"max_tokens": 64, "temperature": 0.5},
            "commit_every_s": 0.05,
        },
    }
    return connect(Recipe.model_validate(table))


@pytest.fixture
def workspace_on(workspace: Workspace) -> MakeWorkspace:
    """The same for these servers; further keywords go into [generation]."""

    def make(*servers: ChatServer | str, **generation: Any) -> Workspace:
        urls = [server if isinstance(server, str) else server.url for server in servers]
        table = workspace.recipe.model_dump()
        table["generation"] |= {"servers": urls, **generation}
        return replace(workspace, recipe=Recipe.model_validate(table))

    return make


@pytest.fixture
def prompts(workspace: Workspace) -> Callable[..., None]:
    """Put a file of prompts, one for each text."""

    def put(name: str, texts: list[str]) -> None:
        assert workspace.prompts is not None
        rows = [{"id": f"{name}-{i}", "messages": [{"role": "user", "content": t}]} for i, t in enumerate(texts)]
        workspace.prompts.put(f"{name}.jsonl", "".join(json.dumps(row) + "\n" for row in rows).encode())

    return put


@pytest.fixture
def generate() -> Generate:
    """Generate all files of prompts of a workspace."""

    def run(workspace: Workspace, **options: Any) -> list[FileOutcome]:
        options.setdefault("watch", UNWATCHED)
        return list(generate_files(workspace, list_prompts(workspace), ids_of, **options))

    return run
