"""Generation against a real server: the demo's target behind `transformers serve`."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from demo.serve import serving
from dflash_core.generation.client import ServerRefuses
from dflash_core.generation.generate import FileGenerated, GenerationWatch, generate_files, list_prompts
from dflash_core.recipe import Recipe
from dflash_core.tokenization.encode import PromptEncoder
from dflash_core.workspace import Workspace, connect
from tests.served_recipe import TARGET, put_prompts, served_recipe

pytestmark = [pytest.mark.services, pytest.mark.timeout(300)]

PROMPTS = 6


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(TARGET, tmp_path_factory.mktemp("serve") / "serve.log") as running:
        yield running


@pytest.fixture
def workspace(bucket: str, tmp_path: Path, url: str) -> Workspace:
    made = served_recipe(url, str(TARGET), bucket, tmp_path)
    assert made.generation is not None
    greedy = made.generation.sampling.model_copy(update={"temperature": 0.0})  # sampled, 1 in 30 answers does not think
    made = made.model_copy(update={"generation": made.generation.model_copy(update={"sampling": greedy})})
    opened = connect(made)
    put_prompts(opened, PROMPTS)
    return opened


def encoder(recipe: Recipe) -> PromptEncoder:
    return PromptEncoder(recipe.tokenizer_path, recipe.tokenization)


def test_the_target_answers_its_prompts(workspace: Workspace) -> None:
    notes: list[str] = []
    watch = GenerationWatch(on_note=notes.append)
    (outcome,) = generate_files(workspace, list_prompts(workspace), encoder(workspace.recipe), watch=watch)
    assert isinstance(outcome, FileGenerated), outcome
    assert notes == [], "the chat template was compared"
    rows = [json.loads(line) for line in workspace.source.get("part-03.jsonl").body.splitlines()]
    assert len(rows) == outcome.manifest.written >= PROMPTS - 1
    for row in rows:
        answer = row["messages"][-1]
        assert answer["content"]
        assert answer["reasoning_content"]
        assert row["finish_reason"] == "stop"
        assert row["usage"]["completion_tokens"] > 20


def test_another_template_is_refused(workspace: Workspace, tmp_path: Path) -> None:
    """What the 87 % came from: the server renders prompts in another way."""
    template = tmp_path / "other.jinja"
    template.write_text("You are helpful. " + (TARGET / "chat_template.jinja").read_text())
    tokenization = workspace.recipe.tokenization.model_copy(update={"chat_template": template})
    other = connect(workspace.recipe.model_copy(update={"tokenization": tokenization}))
    with pytest.raises(ServerRefuses, match="renders prompts differently"):
        list(generate_files(other, list_prompts(other), encoder(other.recipe)))
