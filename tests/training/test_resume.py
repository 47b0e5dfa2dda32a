"""Whatever kills a run, the same command gives the same weights, bit for bit."""

import json
import shutil
from collections.abc import Callable

import pytest

from dflash_core.errors import IncompatibleError, UserError
from dflash_core.local_files import sha256_file
from dflash_core.storage.layout import METRICS_FILE, RunKeys
from dflash_core.training.checkpoint import STATE_FILE, StoredCheckpoints
from dflash_core.training.job import INTERRUPTED, Job
from dflash_core.training.metrics import StepMetrics
from dflash_core.training.train import train
from tests.training.conftest import World, flip, workspace_over
from tests.training.crash import interrupt

pytestmark = pytest.mark.timeout(1200)  # a machine shared with others may give little

STRIDE = 31
"""Every so many crossings one attempt is killed; the test marked scale tries each of them, which takes minutes."""


@pytest.mark.parametrize("stride", [STRIDE, pytest.param(1, marks=[pytest.mark.scale, pytest.mark.timeout(7200)])])
def test_sigkill_anywhere_then_the_same_command_gives_the_same_bits(
    make_world: Callable[..., World], stride: int
) -> None:
    clean = make_world("clean").train_or_die()
    assert clean is not None
    continued = 0
    for point in range(1, clean.crossings + 1, stride):
        world = make_world(f"at{point}")
        assert world.train_or_die(point) is None
        if point % 2:  # the machine is gone, too
            shutil.rmtree(world.recipe.storage.work_dir, ignore_errors=True)
        finished = world.train_or_die()
        assert finished is not None
        assert finished.weights == clean.weights, f"killed at crossing {point} of {clean.crossings}"
        continued += finished.first_step != 1
        shutil.rmtree(world.recipe.storage.work_dir, ignore_errors=True)
    assert continued > 3


def test_every_kill_after_a_kill_still_ends_at_the_same_bits(make_world: Callable[..., World]) -> None:
    clean = make_world("clean").train_or_die()
    world = make_world("often")
    finished, attempts = None, 0
    while finished is None:
        finished = world.train_or_die(45)
        attempts += 1
        assert attempts < 20
    assert attempts > 2
    assert clean is not None
    assert finished.weights == clean.weights


def test_sigterm_while_a_checkpoint_is_written_saves_and_a_second_one_ends_at_once(
    make_world: Callable[..., World],
) -> None:
    plain, _ = make_world("plain").train_here()
    _, crossings, _ = interrupt(make_world("count").recipe, make_world("count").frozen.hash, 0)
    for point in range(crossings // 6, crossings, crossings // 3):
        world = make_world(f"at{point}")
        code, _, error = interrupt(world.recipe, world.frozen.hash, point)
        assert code in (0, 75), (code, error)  # 0: it came after the last step
        if code:
            assert "a checkpoint was saved" in error
            assert not list(world.run_folder.rglob(".saving-*"))
        assert world.train_here()[0].weights.sha256 == plain.weights.sha256
    twice = make_world("twice")
    code, _, _ = interrupt(twice.recipe, twice.frozen.hash, crossings // 6, crossings // 6 + 1)
    assert code == INTERRUPTED
    assert twice.train_here()[0].weights.sha256 == plain.weights.sha256


def test_the_best_checkpoint_is_published_if_the_recipe_asks_wherever_it_is(
    make_world: Callable[..., World], caplog: pytest.LogCaptureFixture
) -> None:
    """A rate that ruins what was learned: the last step is not the best one."""
    ruin = {"learning_rate": 3.0, "warmup_share": 0.9, "schedule": "wsd", "validate_every_steps": 1}
    settings = {**ruin, "checkpoint_every_steps": 1, "held_out_share": 0.3, "publish": "best"}
    plain, seen = make_world("plain", **settings).train_here()
    best = max(seen, key=lambda m: (m.held_out_accepted_prefix or 0.0, -(m.held_out_loss or 0.0)))
    assert best.step == plain.best_step == plain.published_step < plain.steps
    assert plain.best_accepted_prefix == best.held_out_accepted_prefix
    assert f"the checkpoint of step {plain.best_step} had a held-out accepted prefix" in caplog.text
    moved = make_world("moved", **settings)
    moved.stop(plain.best_step + 1)
    shutil.rmtree(moved.recipe.storage.work_dir)  # the best one is in the store alone
    assert moved.train_here()[0].weights.sha256 == plain.weights.sha256
    last, _ = make_world("last", **{**settings, "publish": "last"}).train_here()
    assert last.published_step == last.steps
    assert last.best_step == plain.best_step
    assert last.weights.sha256 != plain.weights.sha256


def test_stopping_at_any_step_repeats_and_skips_nothing(make_world: Callable[..., World]) -> None:
    plain, every = make_world("plain").train_here()
    for step in range(1, 5):
        world = make_world(f"stop{step}")
        world.stop(step)
        checkpoint, seen = world.train_here()
        assert checkpoint.weights.sha256 == plain.weights.sha256
        assert checkpoint.coverage == plain.coverage
        lines = [StepMetrics.model_validate_json(line) for line in world.store.read(checkpoint.metrics).splitlines()]
        assert [m.step for m in lines] == [1, 2, 3, 4, 5, 6]
        assert [(m.loss, m.learning_rate, m.grad_norm) for m in lines] == [
            (m.loss, m.learning_rate, m.grad_norm) for m in every
        ]
        assert [(m.held_out_loss, m.tokens) for m in lines] == [(m.held_out_loss, m.tokens) for m in every]
        assert lines[-len(seen) :] == seen


def test_a_new_machine_continues_from_the_store(make_world: Callable[..., World]) -> None:
    plain, _ = make_world("plain").train_here()
    world = make_world("moved")
    world.stop(3)
    shutil.rmtree(world.recipe.storage.work_dir)
    checkpoint, seen = world.train_here()
    assert seen[0].step > 3
    assert checkpoint.weights.sha256 == plain.weights.sha256
    assert world.store.read(checkpoint.metrics).count(b"\n") == 6


def test_a_damaged_last_checkpoint_falls_back_aloud(
    make_world: Callable[..., World], caplog: pytest.LogCaptureFixture
) -> None:
    plain, _ = make_world("plain").train_here()
    world = make_world("damaged")
    world.stop(3)
    checkpoints = world.run_folder / "checkpoints"
    last = sorted(checkpoints.glob("0*"))[-1]
    flip(last / "masters.safetensors")
    world.lose_in_store(last.name)
    checkpoint, _ = world.train_here()
    assert f"checkpoint of step {int(last.name)} cannot be used" in caplog.text
    assert "trying the one before" in caplog.text
    assert checkpoint.weights.sha256 == plain.weights.sha256


def test_a_damaged_pointer_falls_back_aloud_to_what_is_next_to_it(
    make_world: Callable[..., World], caplog: pytest.LogCaptureFixture
) -> None:
    """And a checkpoint next to it that is damaged, too, falls back to the one before, as always."""
    plain, _ = make_world("plain").train_here()
    world = make_world("damaged")
    world.stop(4)
    world.lose_in_store("")
    checkpoints = world.run_folder / "checkpoints"
    last = sorted(checkpoints.glob("0*"))[-1]
    (checkpoints / "latest.json").write_text("{")
    flip(last / "masters.safetensors")
    checkpoint, seen = world.train_here()
    assert "latest.json cannot be read; every checkpoint next to it is tried" in caplog.text
    assert f"checkpoint of step {int(last.name)} cannot be used" in caplog.text
    assert 1 < seen[0].step <= int(last.name)
    assert checkpoint.weights.sha256 == plain.weights.sha256


def test_a_damaged_local_checkpoint_is_taken_from_the_store(make_world: Callable[..., World]) -> None:
    plain, _ = make_world("plain").train_here()
    world = make_world("damaged")
    world.stop(3)
    for folder in (world.run_folder / "checkpoints").glob("0*"):
        flip(folder / "moments.safetensors")
    checkpoint, seen = world.train_here()
    assert seen[0].step > 3
    assert checkpoint.weights.sha256 == plain.weights.sha256


def test_damaged_objects_in_the_store_are_not_used(
    make_world: Callable[..., World], caplog: pytest.LogCaptureFixture
) -> None:
    plain, _ = make_world("plain").train_here()
    world = make_world("damaged")
    world.stop(3)
    run = world.run_folder.name
    shutil.rmtree(world.recipe.storage.work_dir)
    newest = StoredCheckpoints(world.store, RunKeys(run)).saved()[-1]
    stored = next(f for f in newest.files if "masters" in f.key)
    world.store.put(stored.key, world.store.get(stored.key).body[:-1])
    checkpoint, _ = world.train_here()
    assert "was damaged or replaced" in caplog.text
    assert checkpoint.weights.sha256 == plain.weights.sha256


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"training_set": "feed"}, "training_set"),
        ({"target and tokenizer": "feed"}, "target and tokenizer"),
        ({"seed": "1"}, "seed"),
        ({"drafters (ranks)": "2"}, "drafters (ranks)"),
        ({"code_version": "0"}, "code_version"),
    ],
)
def test_a_checkpoint_of_something_else_is_refused(
    make_world: Callable[..., World], change: dict[str, str], field: str
) -> None:
    world = make_world("other")
    world.stop(3)
    folder = world.run_folder / "checkpoints"
    pointer = json.loads((folder / "latest.json").read_text())
    entry = pointer["checkpoints"][-1]
    state = folder / f"{entry['step']:08d}" / STATE_FILE
    table = json.loads(state.read_text())
    table["identity"].update(change)
    state.write_text(json.dumps(table))
    entry["sha256"] = sha256_file(state)
    (folder / "latest.json").write_text(json.dumps(pointer))
    with pytest.raises(IncompatibleError, match=r"was made with") as refusal:
        world.train_here()
    assert f"{field} = {change[field]}" in str(refusal.value)


def test_another_shape_of_the_step_is_refused(make_world: Callable[..., World]) -> None:
    """The same rows a step, so the same run, but another accumulation: not the same bits."""
    world = make_world("shape")
    world.stop(3)
    training = world.recipe.training.model_copy(update={"batch_rows": 4, "accumulation": 1})
    other = World(world.recipe.model_copy(update={"training": training}), world.frozen, world.store)
    with pytest.raises(IncompatibleError, match=r"training\.accumulation = 2"):
        other.train_here()


def test_two_trainings_of_one_run_do_not_meet(make_world: Callable[..., World]) -> None:
    world = make_world("twice")
    refused: list[str] = []

    def on_step(_: StepMetrics) -> None:
        if not refused:
            with pytest.raises(UserError) as refusal:
                world.train_here()
            refused.append(str(refusal.value))

    train(workspace_over(world.store, world.recipe), Job(world.frozen.hash), on_step)
    assert "another process is training" in refused[0]


def test_what_a_crashed_attempt_wrote_to_the_metrics_is_cut(make_world: Callable[..., World]) -> None:
    world = make_world("metrics")
    world.stop(3)
    with (world.run_folder / METRICS_FILE).open("a") as file:
        file.write('{"step": 99}\n{"step": 1')
    checkpoint, _ = world.train_here()
    lines = world.store.read(checkpoint.metrics).splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
