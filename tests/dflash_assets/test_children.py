"""Core calls in child processes: their answer, their refusal, their death, their numbers; no orphan is left."""

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dagster as dg
import psutil
import pytest
from dagster._core.errors import DagsterExecutionInterruptedError
from dagster_aws.s3 import S3Resource

from dflash_assets import children
from dflash_assets.resources import RecipeResource
from dflash_core.errors import StorageError, UserError
from dflash_core.processes import Parent, run
from dflash_core.records import Reject
from dflash_core.storage.s3 import Access, Store
from dflash_core.training.job import Job
from dflash_core.training.metrics import OnStep, StepMetrics
from dflash_core.training_set.freeze import freeze_training_set
from dflash_core.workspace import Workspace
from tests.dflash_assets.conftest import explicit

Work = Callable[[dg.AssetExecutionContext], object]
InAsset = Callable[[Work], None]


def answer(parent: Parent, workspace: Workspace, drafter: str | None) -> Reject:
    return Reject(line=1, reason="blank")


def refuse(parent: Parent, workspace: Workspace, drafter: str | None) -> Reject:
    raise UserError("no such drafter; train one first")


def die(parent: Parent, workspace: Workspace, drafter: str | None) -> Reject:
    print("about to die", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
    return Reject(line=1, reason="never")


def wait_and_save(parent: Parent, workspace: Workspace, drafter: str | None) -> Reject:
    """`drafter` names a file for the process id."""
    assert drafter is not None
    Path(drafter).write_text(str(os.getpid()))
    try:
        time.sleep(600)
    except KeyboardInterrupt:
        time.sleep(0.3)
        Path(drafter).with_name("saved").touch()
        raise
    return Reject(line=1, reason="never")


def log_a_line(parent: Parent, workspace: Workspace, drafter: str | None) -> Reject:
    parent.tell((3, 1000))
    logging.getLogger("dflash_core.somewhere").warning("a row is odd")
    return Reject(line=1, reason="blank")


def tell_steps(parent: Parent, go: Path) -> None:
    parent.tell(step(123_456, loss=2.5, held_out_accepted_prefix=1.4996789))
    while not go.exists():
        time.sleep(0.05)
    parent.tell(step(123_457, loss=2.0))


def step(number: int, loss: float, held_out_accepted_prefix: float | None = None) -> StepMetrics:
    return StepMetrics(
        step=number,
        steps=200_000,
        epoch=0,
        loss=loss,
        accepted_prefix=1.25,
        slot_accuracy=(0.5,),
        learning_rate=1e-3,
        grad_norm=1.0,
        rows=8,
        tokens=512,
        skipped=False,
        bad_rows=0,
        tokens_per_s=1000.0,
        waiting_share=0.0,
        eta_s=3600.0,
        held_out_accepted_prefix=held_out_accepted_prefix,
    )


@pytest.fixture
def in_asset(instance: dg.DagsterInstance) -> InAsset:
    """Do something in the body of an asset."""

    def work_in_it(work: Work) -> None:
        @dg.asset
        def training(context: dg.AssetExecutionContext) -> None:
            work(context)

        dg.materialize([training], instance=instance)

    return work_in_it


def test_the_answer_is_what_the_function_returned(in_asset: InAsset, workspace: Workspace) -> None:
    answers: list[Reject] = []
    in_asset(lambda context: answers.append(children._answer(context, answer, workspace, None)))
    assert answers == [Reject(line=1, reason="blank")]


def test_a_refusal_is_the_functions_own_sentence(in_asset: InAsset, workspace: Workspace) -> None:
    with pytest.raises(dg.Failure, match=r"^no such drafter; train one first$") as failure:
        in_asset(lambda context: children._answer(context, refuse, workspace, None))
    assert failure.value.allow_retries is False


def test_a_death_shows_the_signal_and_the_last_lines(in_asset: InAsset, workspace: Workspace) -> None:
    with pytest.raises(dg.Failure, match=r"killed by SIGKILL(.|\n)*about to die") as failure:
        in_asset(lambda context: children._answer(context, die, workspace, None))
    assert failure.value.allow_retries is False


def test_an_interruption_lets_it_save_and_leaves_no_process(
    in_asset: InAsset, workspace: Workspace, tmp_path: Path
) -> None:
    pid_file = tmp_path / "pid"
    main_thread = threading.main_thread().ident

    def interrupt() -> None:
        while not pid_file.exists() or not pid_file.read_text():
            time.sleep(0.05)
        assert main_thread is not None
        signal.pthread_kill(main_thread, signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises((KeyboardInterrupt, DagsterExecutionInterruptedError)):
        in_asset(lambda context: children._answer(context, wait_and_save, workspace, str(pid_file)))
    assert not psutil.pid_exists(int(pid_file.read_text()))
    assert (tmp_path / "saved").exists()


def test_what_a_child_logs_is_in_the_runs_log(
    in_asset: InAsset, workspace: Workspace, instance: dg.DagsterInstance
) -> None:
    level = logging.getLogger("dflash_core").level
    in_asset(lambda context: children._answer(context, log_a_line, workspace, None))
    (run_of_asset,) = instance.get_runs()
    lines = [(entry.level, entry.user_message) for entry in instance.all_logs(run_of_asset.run_id)]
    assert (logging.WARNING, "a row is odd") in lines
    assert (logging.INFO, "3 of 1,000 prompts decoded") in lines
    assert logging.getLogger("dflash_core").level == level
    assert not [h for h in logging.getLogger("dflash_core").handlers if isinstance(h, children._ToRun)]


def test_numbers_are_observations_while_the_process_runs(
    in_asset: InAsset,
    workspace: Workspace,
    instance: dg.DagsterInstance,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    go, seen_early = tmp_path / "go", list[dict[str, object]]()

    def observations() -> list[dict[str, object]]:
        found = instance.fetch_observations(dg.AssetKey("training"), limit=10).records
        events = [record.asset_observation for record in reversed(found)]
        return [{name: value.value for name, value in e.metadata.items()} for e in events if e is not None]

    def look() -> None:
        while not observations():
            time.sleep(0.05)
        seen_early.extend(observations())
        go.touch()

    def start(workspace: Workspace, job: Job, on_step: OnStep) -> None:
        run(tell_steps, go, name="training", on_told=on_step)

    monkeypatch.setattr(children, "train_in_ranks", start)
    looking = threading.Thread(target=look)
    looking.start()
    in_asset(lambda context: children.train(context, workspace, Job()))
    looking.join()
    (first,) = seen_early
    expected = {"train loss": 2.5, "held out accepted prefix": 1.5, "step": 123456.0, "seconds left": 3600.0}
    assert {name: first[name] for name in expected} == expected
    assert [number["step"] for number in observations()] in ([123456.0], [123456.0, 123457.0])
    (run_of_asset,) = instance.get_runs()
    lines = [entry.user_message for entry in instance.all_logs(run_of_asset.run_id)]
    assert any(line.startswith("step 123456/200000, loss 2.500") for line in lines)


def test_explicit_keys_reach_the_children(
    in_asset: InAsset,
    recipe_file: Path,
    source: Store,
    sync: Callable[[], object],
    materialize: Callable[..., dg.ExecuteInProcessResult],
    rows: Callable[..., bytes],
    workspace: Workspace,
    access: Access,
    request: pytest.FixtureRequest,
) -> None:
    with recipe_file.open("a") as file:
        file.write(
            "num_layers = 1\n[training]\nepochs = 1\nbatch_rows = 16\nanchors = 4\nheld_out_share = 0.3\n"
            "[evaluation]\nprompts = 2\nmax_new_tokens = 4\ntimed_prompts = 1\ncut_prompts = 1\n"
        )
    for name in ("a", "b"):
        source.put(f"{name}.jsonl", rows(24, name))
    sync()
    assert materialize(["a", "b"]).success
    frozen = freeze_training_set(workspace)
    assert frozen.verdict.passed, frozen.verdict

    request.getfixturevalue("nothing_set")
    with pytest.raises(StorageError, match="no credentials"):
        list(RecipeResource(path=str(recipe_file), s3=S3Resource()).open().source.list())

    made: list[Any] = []

    def train_and_evaluate(context: dg.AssetExecutionContext) -> None:
        opened = RecipeResource(path=str(recipe_file), s3=explicit(access)).open()
        made.append(children.train(context, opened, Job()))
        made.append(children.evaluate(context, opened, None))

    in_asset(train_and_evaluate)
    trained, evaluated = made
    assert (trained.training_set, evaluated.run) == (frozen.hash, trained.run)
