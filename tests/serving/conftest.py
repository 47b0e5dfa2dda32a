"""vLLM from its own environment (`make serving-env`), the demo's target, and drafters trained for the occasion."""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import pytest
import torch

from demo.sample import sample_completions
from demo.word_problems import word_problems
from dflash_core.export.export import export_drafter
from dflash_core.recipe import Recipe, load_recipe
from dflash_core.serving.server import Server
from dflash_core.serving.vllm import DEFAULTS, VllmOptions, vllm_server
from dflash_core.shards.pipeline import tokenize_files
from dflash_core.shards.workers import FileDone
from dflash_core.storage.embedded import ensure_bucket
from dflash_core.storage.partitions import list_sources
from dflash_core.storage.s3 import Access
from dflash_core.training.job import Job
from dflash_core.training.train import train as train_drafter
from dflash_core.training_set.freeze import freeze_training_set
from dflash_core.workspace import Workspace, connect

REPOSITORY = Path(__file__).resolve().parents[2]
DEMO_TARGET = REPOSITORY / "demo" / "target"
COMPLETIONS = 600

Serve = Callable[..., AbstractContextManager[Server]]
Train = Callable[[str, dict[str, Any], bytes], "Trained"]


@dataclass(frozen=True)
class Trained:
    """An exported run."""

    workspace: Workspace
    run: str

    @property
    def folder(self) -> Path:
        """The exported one."""
        local_dir = self.workspace.recipe.export.local_dir
        assert local_dir is not None
        return local_dir


@pytest.fixture(scope="session")
def vllm_python() -> Path:
    """The interpreter of the environment with vLLM."""
    python = REPOSITORY / ".venv-serving" / "bin" / "python"
    if not python.exists():
        pytest.skip("no .venv-serving; make it with `make serving-env`")
    return python


@pytest.fixture(scope="session")
def serve(vllm_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Serve:
    """Starts a server: serve(target, drafter or None, options)."""
    logs = tmp_path_factory.mktemp("vllm")

    def start(
        target: Path, drafter: Path | None = None, options: VllmOptions = DEFAULTS
    ) -> AbstractContextManager[Server]:
        return vllm_server(vllm_python, target, drafter, logs / f"{len(os.listdir(logs))}.log", options)

    return start


@pytest.fixture(scope="module")
def demo_target_server(serve: Serve) -> Iterator[Server]:
    """vLLM with the demo's target and no drafter; chat completions with its template work, too."""
    with serve(DEMO_TARGET) as server:
        yield server


@pytest.fixture(scope="session")
def train(access: Access, tmp_path_factory: pytest.TempPathFactory) -> Train:
    """Completions to exported drafter, each stage as the CLI calls it: train(name, tables of the recipe, JSONL)."""

    def make(name: str, tables: dict[str, Any], completions: bytes) -> Trained:
        torch.set_num_threads(tables["training"]["placement"]["threads"])
        folder = tmp_path_factory.mktemp(name)
        ensure_bucket(name, access)
        recipe = Recipe.model_validate(
            {
                "name": name,
                "source": {"bucket": name, "prefix": "completions/"},
                "storage": {"bucket": name, "prefix": "derived/", "work_dir": folder / "work"},
                "export": {"dtype": "float32", "local_dir": folder / "drafter"},
                **tables,
            }
        )
        workspace = connect(recipe)
        workspace.source.put("file.jsonl", completions)
        (done,) = tokenize_files(workspace, list_sources(workspace.source))
        assert isinstance(done, FileDone), done
        frozen = freeze_training_set(workspace)
        assert frozen.verdict.passed, frozen.verdict
        checkpoint = train_drafter(workspace, Job(), lambda metrics: None)
        export_drafter(workspace, None)
        return Trained(workspace, checkpoint.run)

    return make


@pytest.fixture(scope="session")
def demo_drafter(train: Train) -> Trained:
    """The demo's drafter after four epochs over a third of its completions."""
    recipe = load_recipe(REPOSITORY / "recipes" / "demo.toml")
    questions = [(problem.id, problem.question) for problem in word_problems(COMPLETIONS, 11, "train")]
    rows = sample_completions(DEMO_TARGET, questions, 0.7, 256, 11, on_progress=lambda done, total: None)
    tables = recipe.model_dump(include={"tokenization", "gate", "drafter", "training", "evaluation"})
    tables["training"]["epochs"] = 4
    tables["tokenization"]["workers"] = 1
    target = {"path": DEMO_TARGET, "layers": 3, "dtype": "float32"}
    lines = b"".join(orjson.dumps(row) + b"\n" for row in rows)
    return train("serving-demo", {**tables, "target": target}, lines)
