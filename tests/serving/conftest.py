"""vLLM from its own environment (`make serving-env`), serving the demo's target."""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from dflash_core.evaluation.served import Server
from dflash_core.evaluation.vllm_server import DEFAULTS, VllmOptions, vllm_server

REPOSITORY = Path(__file__).resolve().parents[2]
DEMO_TARGET = REPOSITORY / "demo" / "target"

Serve = Callable[..., AbstractContextManager[Server]]


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
