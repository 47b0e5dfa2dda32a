"""The checks for GPUs, on a CPU with tiny sizes: their logic runs, and where there is no GPU they say so."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_check as gpu_check_module
from benchmarks.pipeline import device_of

REPOSITORY = Path(__file__).resolve().parents[2]


def gpu_check(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "benchmarks/gpu_check.py", *arguments]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)


def test_every_check_runs_on_a_cpu_and_claims_nothing_it_cannot_see(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    done = gpu_check("--device", "cpu", "--tiny", "--json", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(out.read_text())
    assert "proves nothing" in report["machine"]
    checks = report["checks"]
    assert set(checks) == {"flex_equals_sdpa", "no_sync", "objective_memory", "published_shape"}
    assert checks["flex_equals_sdpa"]["passed"] is True
    assert checks["flex_equals_sdpa"]["value float32"] < 1e-5
    assert checks["flex_equals_sdpa"]["gradient_compared"] is False
    assert checks["no_sync"]["passed"] is None
    assert set(checks["no_sync"]["step_s"]) == {"decay", "dpace"}
    assert checks["objective_memory"]["losses"][0] == pytest.approx(checks["objective_memory"]["losses"][1], rel=1e-5)
    shape = checks["published_shape"]
    assert shape["losses"][-1] < shape["losses"][0]
    assert shape["mfu"] is None
    assert shape["flops"] > 6 * shape["parameters"]


def test_one_gpu_is_one_device_however_it_is_spelled() -> None:
    assert device_of("cuda") == device_of("cuda:0") == torch.device("cuda", 0)
    assert (device_of("cuda:1"), device_of("cpu")) == (torch.device("cuda", 1), torch.device("cpu"))


def test_a_check_that_raises_anything_is_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> gpu_check_module.Checked:
        raise NotImplementedError("no such kernel")

    monkeypatch.setitem(gpu_check_module.CHECKS, "no_sync", (broken, 1.0))
    cpu = torch.device("cpu")
    assert gpu_check_module.checked("no_sync", cpu, True, cpu) == {
        "passed": False,
        "error": "NotImplementedError: no such kernel",
    }


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("import os; print('illegal memory access', flush=True); os.abort()", "exit code -6: illegal memory access"),
        ("import time; time.sleep(60)", "not done within 2 s, exit code -9"),
    ],
)
def test_a_check_that_dies_or_hangs_ends_alone(
    program: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "check.py"
    file.write_text(program)
    monkeypatch.setattr(gpu_check_module, "__file__", str(file))
    result = gpu_check_module.apart(["--only", "no_sync"], 2)
    assert result["passed"] is False
    assert result["error"].startswith(reason)


def test_all_checks_together_take_less_than_six_minutes() -> None:
    assert sum(limit_s for _, limit_s in gpu_check_module.CHECKS.values()) < 360


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_is_refused_with_one_sentence() -> None:
    done = gpu_check()
    assert done.returncode == 2
    assert done.stdout.count("\n") == 1
    assert "no CUDA device here" in done.stdout
    assert "Traceback" not in done.stderr
