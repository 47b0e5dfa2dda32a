"""What a run holds with a vocabulary of real size: each worker its tokenizer, and nobody else one."""

import json
import time
from pathlib import Path

import psutil

from dflash_core.recipe import Recipe
from dflash_core.shards.pipeline import tokenize_files
from dflash_core.storage.partitions import list_sources
from dflash_core.workspace import connect

FILES = 6
SHARE = 0.6
"""Of a worker; with its tokenizer it would hold nine tenths."""


def test_the_process_that_forked_the_workers_keeps_no_tokenizer(bucket: str, material: Path) -> None:
    recipe = Recipe.model_validate(
        {
            "name": "test",
            "source": {"bucket": bucket, "prefix": "completions/"},
            "storage": {"bucket": bucket, "prefix": "derived/"},
            "target": {"path": material / "tokenizers/qwen3.6"},
            "tokenization": {"workers": 2},
        }
    )
    workspace = connect(recipe)
    for i in range(FILES):
        workspace.source.put(f"f{i}.jsonl", json.dumps({"prompt": f"q {i}", "completion": "an answer " * 40}).encode())
    outcomes = tokenize_files(workspace, list_sources(workspace.source))
    next(outcomes)
    [nursery] = [
        child for child in psutil.Process().children() if any("_run_child" in word for word in child.cmdline())
    ]
    held, least = 1, 0
    deadline = time.monotonic() + 60
    while held >= SHARE * least and time.monotonic() < deadline:  # it forgets while the first file is at work
        time.sleep(0.1)
        workers = [child.memory_info().rss for child in nursery.children() if child.name() == nursery.name()]
        held, least = nursery.memory_info().rss, min(workers) if len(workers) == 2 else 0
    list(outcomes)
    assert held < SHARE * least
