"""SIGKILL at any time, the same again: the output is the one of a run that nobody killed."""

import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dflash_core.generation.generate import FileOutcome, GenerationWatch
from dflash_core.workspace import Workspace
from tests.chat_server import ChatServer

REPOSITORY = Path(__file__).resolve().parents[2]
PROMPTS = 80


def start(path: Path) -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, "benchmarks/generate.py", "--child", str(path)], cwd=REPOSITORY)


@pytest.mark.timeout(240)
def test_kills_cost_no_row(
    serve: Callable[..., ChatServer],
    workspace_on: Callable[..., Workspace],
    prompts: Callable[[str, list[str]], None],
    generate: Callable[..., list[FileOutcome]],
    workspace: Workspace,
    tmp_path: Path,
) -> None:
    prompts("a", [f"Question {i}?" for i in range(PROMPTS)])
    server = serve(delay_s=0.2)
    asking = workspace_on(server, concurrency=4)
    (tmp_path / "recipe.json").write_text(asking.recipe.model_dump_json())
    chance, kills = random.Random(7), 0
    for _ in range(2):
        answered = server.seen.answers
        client = start(tmp_path / "recipe.json")
        while server.seen.answers < answered + 12 and client.poll() is None:
            time.sleep(0.02)
        time.sleep(chance.uniform(0, 0.5))
        client.kill()
        kills += client.wait() == -signal.SIGKILL
    assert kills == 2
    assert list(workspace.source.list()) == []
    before = server.seen.answers
    assert start(tmp_path / "recipe.json").wait(200) == 0
    survived = PROMPTS - (server.seen.answers - before - 2)
    assert survived >= 4, "what was answered before the kills was asked again"
    killed = workspace.source.get("a.jsonl").body
    rows = [json.loads(line) for line in killed.splitlines()]
    assert [row["id"] for row in rows] == [f"a-{i}" for i in range(PROMPTS)]
    generate(asking, anew=True)
    assert workspace.source.get("a.jsonl").body == killed


def test_an_interrupt_loses_nothing_that_was_answered(
    serve: Callable[..., ChatServer],
    workspace_on: Callable[..., Workspace],
    prompts: Callable[[str, list[str]], None],
    generate: Callable[..., list[FileOutcome]],
) -> None:
    """Whoever stops listening (Ctrl-C, a cancelled run) has the waiting answers committed."""
    prompts("a", [f"Question {i}?" for i in range(40)])
    server = serve(delay_s=0.05)
    asking = workspace_on(server, concurrency=4, commit_every_s=1000)

    class Enough(Exception):
        pass

    def stop(progress: object) -> None:
        if server.seen.answers >= 14:
            raise Enough

    with pytest.raises(ExceptionGroup):
        generate(asking, watch=GenerationWatch(on_progress=stop))
    answered = server.seen.answers
    generate(asking)
    assert server.seen.answers - answered <= 40 + 2 - (14 - 4 - 2)
