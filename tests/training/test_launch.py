"""Training as processes: exit codes, signals, several ranks, and no survivor."""

import gzip
import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dflash_core.recipe import Recipe
from dflash_core.records import CommandFailure, DrafterCheckpoint
from dflash_core.storage.store import Store
from dflash_core.train import main
from dflash_core.training.profiling import profiled, shares
from tests.training.conftest import put_training_set, random_rows
from tests.training.test_trackers import metrics

pytestmark = pytest.mark.timeout(1200)  # a machine shared with others may give little

ROOT = Path(__file__).resolve().parents[2]
Start = Callable[..., "subprocess.Popen[str]"]


def toml(table: dict[str, Any], name: str = "") -> str:
    """A recipe as TOML; None is left out."""
    plain = {k: v for k, v in table.items() if not isinstance(v, dict) and v is not None}
    lines = [f"[{name}]"] if name else []
    lines += [f"{k} = {json.dumps(v)}" for k, v in plain.items()]
    for key, value in table.items():
        if isinstance(value, dict):
            lines.append(toml(value, f"{name}.{key}" if name else key))
    return "\n".join(lines)


@pytest.fixture
def write_recipe(make_recipe: Callable[..., Recipe], tmp_path: Path) -> Callable[..., Path]:
    def write(**training: Any) -> Path:
        path = tmp_path / "recipe.toml"
        path.write_text(toml(make_recipe(**training).model_dump(mode="json")))
        return path

    return write


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """Start a launch in a session of its own, as the asset layer does."""

    def run(recipe: Path, *arguments: str) -> "subprocess.Popen[str]":
        command = [sys.executable, "-m", "dflash_core.train", "--recipe", str(recipe)]
        return subprocess.Popen(
            [*command, "--result", str(tmp_path / "result.json"), *arguments],
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    return run


def children(pid: int) -> list[int]:
    """Every process below `pid`."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            except OSError:
                continue
            if parent == pid:
                found += [int(entry.name), *children(int(entry.name))]
    return found


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def wait_for(condition: Callable[[], Any], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return False


def steps_written(tmp_path: Path) -> int:
    files = list((tmp_path / "work" / "drafter_checkpoint").glob("*/metrics.jsonl"))
    return files[0].read_text().count("\n") if files else 0


def test_a_refusal_is_one_sentence_and_exit_code_2(
    s3: Store, write_recipe: Callable[..., Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    put_training_set(s3, {"file0": random_rows(0, 8)}, passed=False)
    result = tmp_path / "result.json"
    assert main(["--recipe", str(write_recipe()), "--result", str(result)]) == 2
    assert "87 % near-empty" in CommandFailure.model_validate_json(result.read_bytes()).error
    assert "Traceback" not in caplog.text
    assert main(["--recipe", str(tmp_path / "none.toml"), "--result", str(result)]) == 2
    assert "does not exist" in CommandFailure.model_validate_json(result.read_bytes()).error


def test_several_ranks_refuse_with_the_same_one_sentence(
    s3: Store, write_recipe: Callable[..., Path], start: Start
) -> None:
    put_training_set(s3, {"file0": random_rows(0, 8)}, passed=False)
    process = start(write_recipe(batch_rows=2, placement={"targets": ["cpu"] * 2, "drafters": ["cpu"] * 2}))
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 2
    assert "87 % near-empty" in errors
    assert errors.count("\n") == 1, errors


def test_a_missing_device_is_refused(s3: Store, write_recipe: Callable[..., Path], tmp_path: Path) -> None:
    put_training_set(s3, {"file0": random_rows(0, 8)})
    result = tmp_path / "result.json"
    for device, reason in (("cuda:7", "does not exist here"), ("gpu", "is no device")):
        recipe = write_recipe(placement={"targets": [device], "drafters": ["cpu"]})
        assert main(["--recipe", str(recipe), "--result", str(result)]) == 2
        assert reason in CommandFailure.model_validate_json(result.read_bytes()).error


def test_a_signal_saves_and_exits_75_and_the_same_command_continues(
    s3: Store, write_recipe: Callable[..., Path], start: Start, tmp_path: Path
) -> None:
    put_training_set(s3, {"file0": random_rows(0, 20), "file1": random_rows(1, 20)})
    recipe = write_recipe(epochs=2000, max_steps=100_000, checkpoint_every_steps=100_000)
    for number in (signal.SIGINT, signal.SIGTERM):
        before = steps_written(tmp_path)
        process = start(recipe)
        assert wait_for(lambda before=before: steps_written(tmp_path) > before + 3, 300)  # type: ignore[misc]
        process.send_signal(number)
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 75, errors
        assert "a checkpoint was saved" in errors
        assert "Traceback" not in errors
        assert steps_written(tmp_path) > before + 3
    assert "continuing from the checkpoint" in errors


def test_a_profile_is_written_and_says_what_the_step_is_made_of(
    s3: Store, write_recipe: Callable[..., Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    put_training_set(s3, {"file0": random_rows(0, 20)})
    caplog.set_level(logging.INFO)
    assert main(["--recipe", str(write_recipe(max_steps=9)), "--profile"]) == 0
    told = re.search(r"profile of 4 steps: target \d+%, drafter \d+%, objective \d+%.*: (\S+)$", caplog.text, re.M)
    assert told is not None, caplog.text
    events = json.loads(gzip.decompress(Path(told.group(1)).read_bytes()))["traceEvents"]
    assert {"target", "drafter", "objective", "backward", "update"} <= {event.get("name") for event in events}
    caplog.clear()
    Path(told.group(1)).unlink()
    assert main(["--recipe", str(write_recipe(max_steps=9)), "--profile"]) == 0
    assert "no trace was written: this training had 0 steps left" in caplog.text  # it is finished


@pytest.mark.parametrize(("steps", "traced"), [(3, 0), (4, 0), (5, 1), (20, 4)])
def test_a_training_too_short_for_a_profile_says_so(
    steps: int, traced: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    trace = tmp_path / "trace.json.gz"
    with profiled(trace) as step:
        for number in range(steps):
            torch.ones(2).sum()
            step(metrics(number))
    assert trace.exists() == (traced > 0)
    told = f"profile of {traced} steps" if traced else f"no trace was written: this training had {steps} steps left"
    assert told in caplog.text


def test_shares_are_told_of_the_host_alone() -> None:
    """On CUDA the host only launches, and each region comes twice, once a device type."""

    def profiler(device_us: float) -> Any:
        events = [("target", 30.0), ("drafter", 10.0), ("aten::mm", 99.0)]
        averages = [SimpleNamespace(key=k, cpu_time_total=t, device_time_total=device_us) for k, t in events]
        return SimpleNamespace(key_averages=lambda: averages)

    told = shares(profiler(0.0))
    assert told == {"target": 0.75, "drafter": 0.25, "objective": 0.0, "backward": 0.0, "update": 0.0}
    assert shares(profiler(5.0)) is None


@pytest.mark.parametrize("ranks", [2])
def test_several_ranks_end_together(
    s3: Store, write_recipe: Callable[..., Path], start: Start, tmp_path: Path, ranks: int
) -> None:
    """Stop, continue, finish: the same training as on one rank."""
    put_training_set(s3, {"file0": random_rows(0, 8), "file1": random_rows(1, 8)})
    devices = {"targets": ["cpu"] * ranks, "drafters": ["cpu"] * ranks}
    recipe = write_recipe(epochs=2000, max_steps=100_000, batch_rows=2, placement=devices)
    process = start(recipe)
    assert wait_for(lambda: steps_written(tmp_path) > 3, 300)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 75, errors
    assert "Traceback" not in errors
    done = steps_written(tmp_path)
    recipe = write_recipe(epochs=1, batch_rows=2, placement=devices)
    rename(recipe, "short")  # the other one of this name is unfinished
    process = start(recipe)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    checkpoint = DrafterCheckpoint.model_validate_json((tmp_path / "result.json").read_bytes())
    assert done > 3
    assert sum(file.rows for file in checkpoint.coverage) == sum(
        json.loads(line)["rows"] for line in s3.read(checkpoint.metrics).splitlines()
    )
    alone = make_alone(s3, write_recipe, tmp_path)
    assert checkpoint.run[-12:] == alone.run[-12:]  # rows a step are the same


def rename(recipe: Path, name: str) -> Path:
    recipe.write_text(recipe.read_text().replace('name = "tiny"', f'name = "{name}"'))
    return recipe


def make_alone(s3: Store, write_recipe: Callable[..., Path], tmp_path: Path) -> DrafterCheckpoint:
    result = tmp_path / "alone.json"
    assert main(["--recipe", str(rename(write_recipe(epochs=1, batch_rows=4), "alone")), "--result", str(result)]) == 0
    return DrafterCheckpoint.model_validate_json(result.read_bytes())


def session_of(process: "subprocess.Popen[str]") -> Path:
    """Of a launch in several ranks."""
    below = children(process.pid)
    words = Path(f"/proc/{below[0]}/cmdline").read_text().split("\0") if below else []
    return Path(words[words.index("--session") + 1]) if "--session" in words else Path("not yet")


@pytest.mark.parametrize("victim", ["starter killed", "rank stopped", "rank killed"])
def test_nobody_survives_a_dead_or_hanging_process(
    s3: Store, write_recipe: Callable[..., Path], start: Start, tmp_path: Path, victim: str
) -> None:
    put_training_set(s3, {"file0": random_rows(0, 20)})
    devices = {"targets": ["cpu"] * 2, "drafters": ["cpu"] * 2, "timeout_s": 10}
    process = start(write_recipe(epochs=2000, max_steps=100_000, batch_rows=2, placement=devices))
    if victim == "rank stopped":  # before the steps, where nobody loses patience with a rank that works
        assert wait_for(lambda: all((session_of(process) / f"pulse-{rank}").exists() for rank in range(2)), 300)
    else:
        assert wait_for(lambda: steps_written(tmp_path) > 1, 300)
    below = children(process.pid)
    assert len(below) >= 3  # torchrun and two ranks
    sent = signal.SIGSTOP if victim == "rank stopped" else signal.SIGKILL
    os.kill(process.pid if victim == "starter killed" else below[-1], sent)
    sent_at = time.monotonic()
    _, errors = process.communicate(timeout=300)
    assert process.returncode not in (0, 75)
    assert wait_for(lambda: not any(alive(pid) for pid in below), 60)
    assert time.monotonic() - sent_at < 60
    if victim != "starter killed":
        assert re.search(r"because rank [01] died or hung", errors), errors
        assert "ChildFailedError" not in errors
        assert ("was ended by SIGKILL" in errors) is (victim == "rank killed")
