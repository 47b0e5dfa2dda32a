"""Training as processes: several ranks, signals, exit codes, and no survivor."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from dflash_core.errors import GateError, ProcessDied, TrainingStopped, UserError
from dflash_core.local_files import locked
from dflash_core.processes import Child
from dflash_core.recipe import Recipe
from dflash_core.storage.s3 import Store
from dflash_core.target.files import target_fingerprint
from dflash_core.training import ranks
from dflash_core.training.identity import LOCAL_RUNS, run_name
from dflash_core.training.job import INTERRUPTED, Job, StopRequest
from dflash_core.training.metrics import StepMetrics
from dflash_core.training.ranks import train_in_ranks
from dflash_core.training.train import train
from dflash_core.workspace import connect
from tests.training.conftest import put_training_set, random_rows

pytestmark = pytest.mark.timeout(1200)  # a machine shared with others may give little

TWO = {"targets": ["cpu"] * 2, "drafters": ["cpu"] * 2}
ENDLESS = {"epochs": 2000, "max_steps": 100_000, "batch_rows": 2}
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
def start(make_recipe: Callable[..., Recipe], tmp_path: Path) -> Iterator[Start]:
    """Start `dflash train`, with these settings, in a session of its own."""
    started: list[subprocess.Popen[str]] = []

    def run(**training: Any) -> "subprocess.Popen[str]":
        recipe = tmp_path / "recipe.toml"
        recipe.write_text(toml(make_recipe(**training).model_dump(mode="json")))
        command = [sys.executable, "-m", "dflash_core.cli", "train", "--recipe", str(recipe)]
        started.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True))
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> list[Child]:
    """The ranks that this process starts."""
    seen: list[Child] = []

    def noted(*arguments: Any, **options: Any) -> Child:
        seen.append(start_child(*arguments, **options))
        return seen[-1]

    start_child = ranks.start
    monkeypatch.setattr(ranks, "start", noted)
    return seen


def ranks_below(process: "subprocess.Popen[str]") -> list[psutil.Process]:
    return [p for p in psutil.Process(process.pid).children() if "_run_child" in " ".join(p.cmdline())]


def is_gone(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.status() == psutil.STATUS_ZOMBIE
    return True


def wait_for(condition: Callable[[], Any], seconds: float = 300) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return False


def steps_written(tmp_path: Path) -> int:
    files = list((tmp_path / "work" / LOCAL_RUNS).glob("*/metrics.jsonl"))
    return files[0].read_text().count("\n") if files else 0


def test_one_drafter_in_a_process_of_its_own_gives_the_same_weights(
    s3: Store, make_recipe: Callable[..., Recipe]
) -> None:
    put_training_set(s3, {"file0": random_rows(0, 20)})
    recipe = make_recipe(max_steps=4, held_out_share=0.2)
    told, seen = list[StepMetrics](), list[StepMetrics]()
    apart = train_in_ranks(connect(recipe.model_copy(update={"name": "apart"})), Job(), told.append)
    here = train(connect(recipe.model_copy(update={"name": "here"})), Job(), seen.append)
    assert apart.weights.sha256 == here.weights.sha256
    assert apart.coverage == here.coverage
    assert [(m.step, m.loss, m.held_out_loss) for m in told] == [(m.step, m.loss, m.held_out_loss) for m in seen]


def test_several_ranks_stop_continue_and_finish_as_one_would(
    s3: Store, make_recipe: Callable[..., Recipe], children: list[Child]
) -> None:
    """Also where a service manager sends the signal to every process: a rank must not take it for a second one."""
    put_training_set(s3, {"file0": random_rows(0, 8), "file1": random_rows(1, 8)})
    workspace = connect(make_recipe(epochs=3, batch_rows=2, checkpoint_every_steps=100, placement=TWO))
    stop, told = StopRequest(), list[StepMetrics]()

    def on_step(metrics: StepMetrics) -> None:
        told.append(metrics)
        if metrics.step == 3:
            stop.ask()
            for child in children:
                for number in (signal.SIGTERM, signal.SIGINT):
                    child.process.send_signal(number)

    with pytest.raises(TrainingStopped, match="a checkpoint was saved, the same command continues"):
        train_in_ranks(workspace, Job(), on_step, stop)
    assert all(is_gone(psutil.Process(child.process.pid)) for child in children if psutil.pid_exists(child.process.pid))
    stopped_at = told[-1].step
    checkpoint = train_in_ranks(workspace, Job(), told.append)
    assert len(children) == 4
    assert checkpoint.steps > stopped_at
    assert [m.step for m in told] == list(range(1, checkpoint.steps + 1)), "each is told once, by the lead"
    written = [json.loads(line) for line in s3.read(checkpoint.metrics).splitlines()]
    assert [line["step"] for line in written] == [m.step for m in told]
    assert sum(file.rows for file in checkpoint.coverage) == sum(line["rows"] for line in written)
    seen: list[StepMetrics] = []
    alone = train(connect(make_recipe(epochs=3, batch_rows=4).model_copy(update={"name": "alone"})), Job(), seen.append)
    assert checkpoint.run[-12:] == alone.run[-12:]  # rows a step are the same
    assert [m.loss for m in told] == pytest.approx([m.loss for m in seen], rel=1e-3)


@pytest.mark.parametrize("drafters", [1, 2])
def test_every_rank_refuses_with_the_same_one_sentence(s3: Store, start: Start, drafters: int) -> None:
    put_training_set(s3, {"file0": random_rows(0, 8)}, passed=False)
    process = start(batch_rows=2, placement={"targets": ["cpu"] * drafters, "drafters": ["cpu"] * drafters})
    _, errors = process.communicate(timeout=300)
    assert process.returncode == GateError.exit_code == 2
    assert "87 % near-empty" in errors
    assert errors.count("\n") == 1, errors


def test_a_rank_that_refuses_gives_its_own_sentence_while_others_wait_for_it(
    s3: Store, make_recipe: Callable[..., Recipe], children: list[Child], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "GRACE_S", 0.1)
    frozen = put_training_set(s3, {"file0": random_rows(0, 8)})
    recipe = make_recipe(batch_rows=2, placement=TWO)
    run = run_name(recipe, frozen, target_fingerprint(recipe.target.path))
    folder = recipe.storage.work_dir / LOCAL_RUNS / run
    folder.mkdir(parents=True)
    with (
        locked(folder / "lock", AssertionError("it is free")),
        pytest.raises(UserError, match=f"^another process is training {run} already"),
    ):
        train_in_ranks(connect(recipe), Job(), lambda _: None)
    assert all(child.process.poll() is not None for child in children)


def test_a_killed_rank_is_named_and_takes_the_others_along(
    s3: Store, make_recipe: Callable[..., Recipe], children: list[Child]
) -> None:
    put_training_set(s3, {"file0": random_rows(0, 20)})

    def on_step(metrics: StepMetrics) -> None:
        if metrics.step == 2:
            children[1].process.kill()

    with pytest.raises(ProcessDied, match=r"because rank 1 was killed \(.*rank 1 was killed by SIGKILL.*\)") as death:
        train_in_ranks(connect(make_recipe(**ENDLESS, placement=TWO)), Job(), on_step)
    assert "the same command continues from the last" in str(death.value)
    assert "rank 0 was killed" not in str(death.value)
    assert all(child.process.poll() is not None for child in children)


@pytest.mark.parametrize("when", ["before the steps", "in a step"])
def test_a_rank_that_stands_still_is_named_and_ended_with_the_others(
    s3: Store,
    make_recipe: Callable[..., Recipe],
    children: list[Child],
    when: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before the steps nobody loses patience with a rank that works, so its silence alone tells."""
    put_training_set(s3, {"file0": random_rows(0, 20)})
    recipe = make_recipe(**ENDLESS, placement={**TWO, "timeout_s": 10})
    stopped: list[bool] = []

    def stop_rank_1() -> None:
        if len(children) == 2 and not stopped:
            os.kill(children[1].process.pid, signal.SIGSTOP)
            stopped.append(True)

    def start_then_stop(*arguments: Any, **options: Any) -> Child:
        made = start_noted(*arguments, **options)
        if when == "before the steps":
            stop_rank_1()
        return made

    start_noted = ranks.start
    monkeypatch.setattr(ranks, "start", start_then_stop)
    with pytest.raises(ProcessDied, match="because rank 1 died or hung"):
        train_in_ranks(connect(recipe), Job(), lambda _: stop_rank_1())
    assert stopped
    assert all(child.process.poll() is not None for child in children)


def test_an_exception_in_the_starter_lets_the_ranks_save(
    s3: Store, make_recipe: Callable[..., Recipe], children: list[Child]
) -> None:
    """So a Dagster run is terminated."""
    put_training_set(s3, {"file0": random_rows(0, 20)})
    recipe = make_recipe(**ENDLESS, checkpoint_every_steps=100_000)

    def on_step(metrics: StepMetrics) -> None:
        if metrics.step == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_in_ranks(connect(recipe), Job(), on_step)
    assert all(child.process.poll() is not None for child in children)
    (run,) = (recipe.storage.work_dir / LOCAL_RUNS).iterdir()
    assert json.loads((run / "checkpoints" / "latest.json").read_text())["checkpoints"][-1]["step"] >= 3


def test_a_signal_saves_and_exits_75_and_the_same_command_continues(s3: Store, start: Start, tmp_path: Path) -> None:
    put_training_set(s3, {"file0": random_rows(0, 20), "file1": random_rows(1, 20)})
    for number in (signal.SIGINT, signal.SIGTERM):
        before = steps_written(tmp_path)
        process = start(**ENDLESS, checkpoint_every_steps=100_000)
        assert wait_for(lambda before=before: steps_written(tmp_path) > before + 3)  # type: ignore[misc]
        assert not ranks_below(process)
        errors = stopped_by(process, number)
        assert steps_written(tmp_path) > before + 3
    assert "continuing from the checkpoint" in errors


def test_a_signal_to_the_starter_stops_every_rank_with_a_checkpoint(s3: Store, start: Start, tmp_path: Path) -> None:
    put_training_set(s3, {"file0": random_rows(0, 20)})
    process = start(**ENDLESS, checkpoint_every_steps=100_000, placement=TWO)
    assert wait_for(lambda: steps_written(tmp_path) > 3)
    below = ranks_below(process)
    assert len(below) == 2
    stopped_by(process, signal.SIGINT)
    assert all(map(is_gone, below))


def stopped_by(process: "subprocess.Popen[str]", number: signal.Signals) -> str:
    """What a training says that is stopped in good order."""
    process.send_signal(number)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == TrainingStopped.exit_code == 75, errors
    assert "a checkpoint was saved" in errors
    assert errors.count("stopping after this step") == 1, errors
    assert "Traceback" not in errors
    return errors


def test_a_second_signal_ends_every_process_at_once(s3: Store, start: Start, tmp_path: Path) -> None:
    put_training_set(s3, {"file0": random_rows(0, 20)})
    process = start(**ENDLESS, placement=TWO)
    assert process.stderr is not None
    assert wait_for(lambda: steps_written(tmp_path) > 1)
    below = ranks_below(process)
    below[1].suspend()  # so that no step ends any more
    process.send_signal(signal.SIGINT)
    assert any("once more to stop without saving" in line for line in process.stderr)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == INTERRUPTED
    assert len(below) == 2
    assert wait_for(lambda: all(map(is_gone, below)), 60)


def test_no_rank_survives_a_killed_starter(s3: Store, start: Start, tmp_path: Path) -> None:
    put_training_set(s3, {"file0": random_rows(0, 20)})
    process = start(**ENDLESS, placement=TWO)
    assert wait_for(lambda: steps_written(tmp_path) > 1)
    below = ranks_below(process)
    assert len(below) == 2
    below[0].suspend()
    process.kill()
    process.wait()
    assert wait_for(lambda: all(map(is_gone, below)), 60)
