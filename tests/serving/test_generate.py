"""Generation against vLLM: the template is compared id by id, and every row carries the engine's own ids."""

import json
from pathlib import Path

import pytest

from dflash_core.generation.client import ServerRefuses
from dflash_core.generation.generate import FileGenerated, GenerationWatch, generate_files, list_prompts
from dflash_core.generation.prompt_file import Prompt, PromptFile
from dflash_core.serving.server import Server
from dflash_core.tokenization.encode import PromptEncoder
from dflash_core.tokenization.tokenizer import load_tokenizer
from dflash_core.workspace import connect
from tests.served_recipe import TARGET, put_prompts, served_recipe

pytestmark = [pytest.mark.serving, pytest.mark.timeout(900)]

PROMPTS = 12


def test_rows_carry_the_engines_ids(demo_target_server: Server, bucket: str, tmp_path: Path) -> None:
    recipe = served_recipe(f"{demo_target_server.url}/v1", demo_target_server.model(None), bucket, tmp_path)
    workspace = connect(recipe)
    put_prompts(workspace, PROMPTS)
    notes: list[str] = []
    encoder = PromptEncoder(recipe.tokenizer_path, recipe.tokenization)
    (outcome,) = generate_files(
        workspace, list_prompts(workspace), encoder, watch=GenerationWatch(on_note=notes.append)
    )
    assert isinstance(outcome, FileGenerated), outcome
    assert notes == []
    assert workspace.prompts is not None
    prompts = [p for p in PromptFile(workspace.prompts.get("part-03.jsonl").body, "") if isinstance(p, Prompt)]
    ids = {prompt.row_id: encoder(prompt) for prompt in prompts}
    tokenizer = load_tokenizer(recipe.tokenizer_path, recipe.tokenization)
    rows = [json.loads(line) for line in workspace.source.get("part-03.jsonl").body.splitlines()]
    assert len(rows) >= PROMPTS - 2
    for row in rows:
        assert row["prompt_token_ids"] == ids[row["id"]]
        assert len(row["completion_token_ids"]) == row["usage"]["completion_tokens"]
        assert row["messages"][-1]["content"].strip() in tokenizer.reference.decode(row["completion_token_ids"])
        if row["finish_reason"] == "stop":
            assert row["completion_token_ids"][-1] == tokenizer.added[str(tokenizer.eos)]


def test_another_template_is_refused_by_its_ids(demo_target_server: Server, bucket: str, tmp_path: Path) -> None:
    recipe = served_recipe(f"{demo_target_server.url}/v1", demo_target_server.model(None), bucket, tmp_path)
    workspace = connect(recipe)
    put_prompts(workspace, 1)
    template = tmp_path / "other.jinja"
    template.write_text((TARGET / "chat_template.jinja").read_text() + "<think>")
    tokenization = recipe.tokenization.model_copy(update={"chat_template": template})
    workspace = connect(recipe.model_copy(update={"tokenization": tokenization}))
    encoder = PromptEncoder(recipe.tokenizer_path, tokenization)
    with pytest.raises(ServerRefuses, match="renders prompts differently: from token"):
        list(generate_files(workspace, list_prompts(workspace), encoder))
