"""`dflash generate`: the same core call as the asset, the key from the environment, refusals in one sentence."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from dflash_core.completions.completion import Message
from dflash_core.generation.prompt_file import Prompt
from dflash_core.recipe import load_recipe
from dflash_core.tokenization.encode import PromptEncoder
from dflash_core.workspace import connect
from tests.chat_server import ChatServer
from tests.test_cli import dflash, recipe  # noqa: F401 - a fixture

KEY = "sk-of-the-command"


@pytest.fixture
def generating(recipe: Path, bucket: str, serve: Callable[..., ChatServer]) -> Path:  # noqa: F811
    """The recipe with prompts and a server that counts tokens as the demo target's tokenizer does."""
    without = load_recipe(recipe)
    encoder = PromptEncoder(without.tokenizer_path, without.tokenization)
    count = lambda text: len(encoder(Prompt(1, "", (Message("user", text),), (), "")))  # noqa: E731
    server = serve(count_tokens=count, key=KEY)
    recipe.write_text(
        recipe.read_text() + f'[generation]\nprompts = {{ bucket = "{bucket}", prefix = "asked/" }}\n'
        f'servers = ["{server.url}"]\nmodel = "tiny"\napi_key_variable = "TEST_KEY"\nsampling = {{ max_tokens = 64 }}\n'
    )
    prompts = connect(load_recipe(recipe)).prompts
    assert prompts is not None
    for name, count_of in (("a", 5), ("b", 3)):
        lines = [json.dumps({"prompt": f"What is {i} plus {i} in {name}?"}) for i in range(count_of)]
        prompts.put(f"{name}.jsonl", "\n".join(lines).encode())
    return recipe


def test_generate_then_verify(generating: Path) -> None:
    made = dflash("generate", "b", "--recipe", str(generating), TEST_KEY=KEY)
    assert made.returncode == 0, made.stderr
    assert made.stdout.startswith("1 of 1 files, 0 of them still valid: 3 prompts, 3 completions with ")
    made = dflash("generate", "--recipe", str(generating), TEST_KEY=KEY)
    assert made.stdout.startswith("2 of 2 files, 1 of them still valid: 8 prompts, 8 completions with ")
    assert KEY not in made.stdout + made.stderr
    verified = dflash("verify", "--recipe", str(generating))
    assert verified.stdout.startswith("2 of 2 files read, 8 rows, 0 rejected")


def test_refusals_are_one_sentence(generating: Path) -> None:
    for arguments, environment, sentence in (
        ((), {}, "generation.api_key_variable names TEST_KEY, which is not set"),
        (("nothing",), {"TEST_KEY": KEY}, "no prompts for nothing; there are 2, from a to b"),
        (("--server", "http://169.254.169.254/v1"), {"TEST_KEY": KEY}, "never talked to"),
        (("--server", "http://127.0.0.1:9/v1"), {"TEST_KEY": KEY}, "cannot be used"),
    ):
        refused = dflash("generate", *arguments, "--recipe", str(generating), **environment)
        assert refused.returncode == 2, refused.stderr
        assert sentence in refused.stderr
        assert len(refused.stderr.strip().splitlines()) == 1
