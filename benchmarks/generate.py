"""Generation against a server of our own: slots kept busy, memory flat, and kills that cost no row.

    python benchmarks/generate.py --json OUT [--prompts 20000] [--slots 256] [--delay 2] [--kills 5]
                                  [--killed-delay 0.5]

The server (tests/chat_server.py, a process of its own) answers after a fixed time with a text that is a function of the
prompt. First everything is generated without a break: how many slots were busy on average is what the server saw. Then
once more under another prefix, the client killed with SIGKILL at random and started again; both have to end in the same
bytes. A bar that is missed is named, with exit code 1.
"""

# ruff: noqa: E402 - the folder holds a tokenize.py, which must not hide the standard library's: it leaves the path
import sys
from os.path import dirname

sys.path[0] = dirname(dirname(__file__)) if __name__ == "__main__" else sys.path[0]

import argparse
import json
import os
import random
import signal
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from dflash_core.generation.generate import FileGenerated, generate_files, list_prompts
from dflash_core.generation.prompt_file import Prompt
from dflash_core.processes import free_ports
from dflash_core.recipe import Recipe
from dflash_core.storage.embedded import embedded_store, ensure_bucket
from dflash_core.storage.s3 import Access
from dflash_core.workspace import Workspace, connect

ROOT = Path(__file__).resolve().parent.parent
ROWS = 500
SAMPLE_S = 0.5
MIN_BUSY = 0.9
FLAT = 1.15
"""Times what was resident when a tenth was done."""

Numbers = dict[str, float]


def main() -> None:
    """Entry point; `--child` is one generating client."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--prompts", type=int, default=20_000)
    parser.add_argument("--slots", type=int, default=256)
    parser.add_argument("--delay", type=float, default=2.0)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--killed-delay", type=float, default=0.5, help="answers may come faster while it is killed")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child is not None:
        return _child(arguments.child)
    numbers: Numbers = {}
    with tempfile.TemporaryDirectory() as folder, embedded_store(Path(folder) / "store") as access:
        ensure_bucket("bench", access)
        for part in (_busy, _killed):
            found = part(Path(folder), access, arguments)
            print("\n".join(f"{name:34} {value:,.3f}" for name, value in found.items()), flush=True)
            numbers |= found
    missed = [
        *([f"{numbers['busy slots']:.3f} of the slots are busy"] if numbers["busy slots"] < MIN_BUSY else []),
        *([f"memory grows {numbers['memory growth']:.2f} x"] if numbers["memory growth"] > FLAT else []),
        *([f"{numbers['kills']} of {arguments.kills} kills"] if numbers["kills"] < arguments.kills else []),
        *(["the killed run's bytes differ"] if not numbers["equal bytes after kills"] else []),
    ]
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(numbers, indent=1) + "\n")
    sys.exit(f"missed: {'; '.join(missed)}" if missed else 0)


def _child(path: Path) -> None:
    workspace = connect(Recipe.model_validate_json(path.read_text()))
    for outcome in generate_files(workspace, list_prompts(workspace), _characters):
        assert isinstance(outcome, FileGenerated), outcome


def _characters(prompt: Prompt) -> list[int]:
    """The server's tokens are characters."""
    return [ord(c) for c in prompt.messages[-1].content]


def _busy(folder: Path, access: Access, arguments: argparse.Namespace) -> Numbers:
    """One run without a break."""
    port = free_ports(1)[0]
    workspace = connect(_recipe(folder, "whole", port, arguments.slots), access)
    _put_prompts(workspace, arguments.prompts)
    with _server(port, arguments.delay) as url:
        client = psutil.Process(_start(folder, workspace))
        began, resident, seen = time.monotonic(), [], {}
        cpu_s, first = 0.0, 0.0
        while _works(client):
            cpu_s = sum(client.cpu_times()[:2])
            seen = _ask(f"{url}/seen")
            first = first or (time.monotonic() if seen["answers"] > 2 else 0.0)
            resident.append((seen["answers"], client.memory_info().rss / 1e6))
            time.sleep(SAMPLE_S)
        wall_s = time.monotonic() - began
        seen = _ask(f"{url}/seen")
    early = max(mb for answers, mb in resident if answers <= 0.1 * arguments.prompts)
    used_s = seen["last"] - seen["first"]
    return {
        "prompts": arguments.prompts,
        "slots": arguments.slots,
        "wall s": wall_s,
        "shortest possible s": arguments.prompts / arguments.slots * arguments.delay,
        "busy slots": seen["slot_seconds"] / (arguments.slots * used_s),
        "most in flight": seen["most"],
        "client CPU ms a request": 1000 * cpu_s / arguments.prompts,
        "client MB at a tenth": early,
        "client MB at most": max(mb for _, mb in resident),
        "memory growth": max(mb for _, mb in resident) / early,
    }


def _killed(folder: Path, access: Access, arguments: argparse.Namespace) -> Numbers:
    """Killed at random, resumed, and compared with the run without a break."""
    whole = json.loads((folder / "whole.json").read_text())
    port = int(whole["generation"]["servers"][0].rsplit(":", 1)[1].split("/")[0])
    workspace = connect(_recipe(folder, "killed", port, arguments.slots), access)
    chance, kills = random.Random(0), 0
    with _server(port, arguments.killed_delay) as url:
        moments = sorted(chance.uniform(0.02, 0.98) * arguments.prompts for _ in range(arguments.kills))
        client = psutil.Process(_start(folder, workspace))
        for moment in moments:
            while _works(client) and _ask(f"{url}/seen")["answers"] < moment:
                time.sleep(SAMPLE_S)
            client.send_signal(signal.SIGKILL)
            kills += client.wait() == -signal.SIGKILL
            client = psutil.Process(_start(folder, workspace))
        client.wait()
        seen = _ask(f"{url}/seen")
    rows = [json.loads(line)["id"] for body in _outputs(workspace).values() for line in body.splitlines()]
    return {
        "kills": kills,
        "rows after kills": len(rows),
        "rows twice": len(rows) - len(set(rows)),
        "asked more than once": seen["answers"] - len(rows),
        "equal bytes after kills": float(
            _outputs(workspace) == _outputs(connect(Recipe.model_validate(whole), access))
        ),
    }


def _outputs(workspace: Workspace) -> dict[str, bytes]:
    source = workspace.source
    return {key: source.get(key).body for key, _, _ in source.list()}


def _recipe(folder: Path, name: str, port: int, slots: int) -> Recipe:
    return Recipe.model_validate(
        {
            "name": name,
            "source": {"bucket": "bench", "prefix": f"{name}/completions/"},
            "storage": {"bucket": "bench", "prefix": f"{name}/derived/", "work_dir": folder / "work"},
            "target": {"path": folder},
            "generation": {
                "prompts": {"bucket": "bench", "prefix": "prompts/"},
                "servers": [f"http://127.0.0.1:{port}/v1"],
                "model": "tiny",
                "concurrency": slots,
                "commit_every_s": 2,
                "sampling": {"max_tokens": 512},
            },
        }
    )


def _put_prompts(workspace: Workspace, count: int) -> None:
    assert workspace.prompts is not None
    rows = [json.dumps({"id": f"{i}", "prompt": f"Question {i}: {'how and why? ' * (i % 9)}"}) for i in range(count)]
    for start in range(0, count, ROWS):
        workspace.prompts.put(f"part-{start // ROWS:04d}.jsonl", "\n".join(rows[start : start + ROWS]).encode())


def _start(folder: Path, workspace: Workspace) -> int:
    """A generating client; its process id."""
    path = folder / f"{workspace.recipe.name}.json"
    path.write_text(workspace.recipe.model_dump_json())
    command = [sys.executable, __file__, "--child", str(path)]
    return subprocess.Popen(command, cwd=ROOT, env=os.environ | workspace.access.environment()).pid


@contextmanager
def _server(port: int, delay_s: float) -> Iterator[str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.chat_server", "--port", str(port), "--delay", str(delay_s)], cwd=ROOT
    )
    url = f"http://127.0.0.1:{port}/v1"
    try:
        deadline = time.monotonic() + 30
        while True:
            try:
                _ask(f"{url}/seen")
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)
        yield url
    finally:
        process.kill()
        process.wait()


def _works(client: psutil.Process) -> bool:
    return client.is_running() and client.status() != psutil.STATUS_ZOMBIE


def _ask(url: str) -> dict[str, Any]:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=30) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


if __name__ == "__main__":
    main()
