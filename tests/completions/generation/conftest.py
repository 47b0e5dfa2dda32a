"""A recipe with a [generation] section on a fresh bucket, prompts in it, and a server that can misbehave."""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from dflash_core.completions.generation.generate import FileOutcome, Watch, generate_files
from dflash_core.completions.generation.inputs import list_prompts
from dflash_core.completions.generation.prompts import Prompt
from dflash_core.recipe import Recipe
from dflash_core.storage.store import Stores, open_stores
from tests.chat_server import Behaviour, ChatServer, running

MakeRecipe = Callable[..., Recipe]
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
def recipe_on(bucket: str, tmp_path: Path) -> MakeRecipe:
    """A recipe for these servers; further keywords go into [generation]."""

    def make(*servers: ChatServer | str, **generation: Any) -> Recipe:
        urls = [server if isinstance(server, str) else server.url for server in servers]
        section = {
            "prompts": {"bucket": bucket, "prefix": "prompts/"},
            "servers": urls,
            "model": "tiny",
            "sampling": {"max_tokens": 64, "temperature": 0.5},
            "commit_every_s": 0.05,
            **generation,
        }
        table = {
            "name": "test",
            "source": {"bucket": bucket, "prefix": "completions/"},
            "storage": {"bucket": bucket, "prefix": "derived/", "work_dir": tmp_path / "work"},
            "target": {"path": tmp_path},
            "generation": section,
        }
        return Recipe.model_validate(table)

    return make


@pytest.fixture
def prompts(bucket: str, recipe_on: MakeRecipe) -> Callable[..., None]:
    """Put a file of prompts, one for each text."""

    def put(name: str, texts: list[str]) -> None:
        stores = open_stores(recipe_on("http://127.0.0.1:9/v1"))
        assert stores.prompts is not None
        rows = [{"id": f"{name}-{i}", "messages": [{"role": "user", "content": t}]} for i, t in enumerate(texts)]
        stores.prompts.put(f"{name}.jsonl", "".join(json.dumps(row) + "\n" for row in rows).encode())

    return put


@pytest.fixture
def generate() -> Generate:
    """Generate all files of a recipe."""

    def run(recipe: Recipe, **options: Any) -> list[FileOutcome]:
        options.setdefault("watch", Watch())
        return list(generate_files(recipe, list_prompts(recipe), ids_of, **options))

    return run


@pytest.fixture
def stores(recipe_on: MakeRecipe) -> Stores:
    return open_stores(recipe_on("http://127.0.0.1:9/v1"))
