"""The trace of a few steps, and what share of them each part is."""

import gzip
import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dflash_core.recipe import Recipe
from dflash_core.storage.s3 import Store
from dflash_core.training.job import Job
from dflash_core.training.profiling import profiled, shares
from dflash_core.training.train import train
from dflash_core.workspace import connect
from tests.training.conftest import put_training_set, random_rows
from tests.training.test_trackers import metrics


def test_a_profile_is_written_and_says_what_the_step_is_made_of(
    s3: Store, make_recipe: Callable[..., Recipe], caplog: pytest.LogCaptureFixture
) -> None:
    put_training_set(s3, {"file0": random_rows(0, 20)})
    caplog.set_level(logging.INFO)
    workspace = connect(make_recipe(max_steps=9))
    train(workspace, Job(profile=True), lambda _: None)
    told = re.search(r"profile of 4 steps: target \d+%, drafter \d+%, objective \d+%.*: (\S+)$", caplog.text, re.M)
    assert told is not None, caplog.text
    events = json.loads(gzip.decompress(Path(told.group(1)).read_bytes()))["traceEvents"]
    assert {"target", "drafter", "objective", "backward", "update"} <= {event.get("name") for event in events}
    caplog.clear()
    Path(told.group(1)).unlink()
    train(workspace, Job(profile=True), lambda _: None)
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
