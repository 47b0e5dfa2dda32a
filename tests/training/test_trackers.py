"""Trackers: each package for real, offline; a continued run continues its curve; a missing package is one sentence."""

import importlib
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dflash_core.errors import RecipeError
from dflash_core.training import trackers
from dflash_core.training.metrics import StepMetrics
from dflash_core.training.trackers import open_trackers

RUN = "tiny-0123456789ab"


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine, a tracker's own process has the time to start and to write."""
    monkeypatch.setattr(trackers, "CLOSING_S", 600.0)


def metrics(step: int, loss: float | None = 2.0) -> StepMetrics:
    return StepMetrics(
        step=step,
        steps=9,
        epoch=0,
        loss=loss,
        accepted_prefix=1.5,
        slot_accuracy=(0.5, 0.25),
        learning_rate=1e-3,
        grad_norm=None if loss is None else 0.7,
        rows=4,
        tokens=100,
        skipped=loss is None,
        bad_rows=0,
        tokens_per_s=50.0,
        waiting_share=0.1,
        eta_s=3.0,
        held_out_loss=1.9 if step == 3 else None,
        held_out_accepted_prefix=1.7 if step == 3 else None,
        acceptance_length=1.6 if step == 3 else None,
    )


def tracked(name: str, folder: Path, steps: range, lost: int | None = None) -> None:
    with open_trackers([name], RUN, folder, steps.start - 1) as track:
        for step in steps:
            track(metrics(step, None if step == lost else float(step)))


def test_tensorboard_files_hold_the_curve_and_a_continued_run_replaces_what_was_lost(tmp_path: Path) -> None:
    tracked("tensorboard", tmp_path, range(1, 5))
    tracked("tensorboard", tmp_path, range(4, 7))  # the run continues from a checkpoint of step 3
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(s, float(s)) for s in range(1, 7)]
    assert [e.step for e in events.Scalars("held_out/acceptance_length")] == [3]


def test_wandb_offline_keeps_the_run_under_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    for key, value in {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_DIR": str(tmp_path)}.items():
        monkeypatch.setenv(key, value)
    tracked("wandb", tmp_path, range(1, 4))
    (file,) = tmp_path.rglob("*.wandb")
    body = file.read_bytes()
    assert RUN in file.name
    assert b"held_out/acceptance_length" in body


@pytest.fixture
def mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The package, with a store of its own on this disk."""
    package = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    return package


def test_mlflow_keeps_one_run_over_a_continuation(tmp_path: Path, mlflow: Any) -> None:
    tracked("mlflow", tmp_path, range(1, 3))
    tracked("mlflow", tmp_path, range(3, 6), lost=4)
    client = mlflow.MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("dflash").experiment_id])
    assert run.info.run_name == RUN
    assert [m.step for m in client.get_metric_history(run.info.run_id, "train/loss")] == [1, 2, 3, 5]


def test_an_mlflow_outage_costs_points_of_the_curve_and_is_told_once_and_counted(
    tmp_path: Path, mlflow: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    log_batch = mlflow.MlflowClient.log_batch

    def sometimes(client: Any, run: str, metrics: list[Any]) -> None:
        if metrics[0].step in (2, 3):
            raise mlflow.exceptions.MlflowException("no route to host")
        log_batch(client, run, metrics)

    monkeypatch.setattr(mlflow.MlflowClient, "log_batch", sometimes)
    tracked("mlflow", tmp_path, range(1, 6))
    client = mlflow.MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("dflash").experiment_id])
    assert [m.step for m in client.get_metric_history(run.info.run_id, "train/loss")] == [1, 4, 5]
    assert run.info.status == "FINISHED"
    assert caplog.text.count("no route to host") == 1
    assert "MLflow lacks 2 steps of this training" in caplog.text


def test_an_mlflow_that_hangs_holds_up_neither_a_step_nor_the_end(
    tmp_path: Path, mlflow: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    held, go = threading.Event(), threading.Event()

    def hang(*_: object) -> None:
        held.set()
        go.wait(60)

    monkeypatch.setattr(mlflow.MlflowClient, "log_batch", hang)
    monkeypatch.setattr(trackers, "WAITING_STEPS", 3)
    monkeypatch.setattr(trackers, "CLOSING_S", 0.1)
    with open_trackers(["mlflow"], RUN, tmp_path, 0) as track:
        track(metrics(1))
        assert held.wait(60)
        for step in range(2, 9):
            track(metrics(step))
        assert "3 steps wait for it" in caplog.text
    assert "MLflow lacks 8 steps of this training" in caplog.text
    go.set()


def test_an_mlflow_that_is_not_there_is_refused_by_its_address(
    tmp_path: Path, mlflow: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(RecipeError, match=r"MLflow at http://127\.0\.0\.1:9 cannot be used.*MLFLOW_TRACKING_URI"):
        tracked("mlflow", tmp_path, range(1, 3))


@pytest.mark.parametrize(
    ("name", "module", "package"),
    [
        ("wandb", "wandb", "wandb"),
        ("mlflow", "mlflow", "mlflow-skinny"),
        ("tensorboard", "torch.utils.tensorboard", "tensorboard"),
    ],
)
def test_a_missing_package_is_named(
    name: str, module: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError):
        importlib.import_module(module)
    with pytest.raises(RecipeError, match=f"needs the package {package}, which is not installed"):
        tracked(name, tmp_path, range(1, 2))
