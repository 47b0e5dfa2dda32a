"""The drafter reproduces numbers of public reference code."""

import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("case", ["drafter_full", "drafter_sliding"])
def test_hidden_states_loss_and_gradients_are_the_reference_ones(material: Path, case: str) -> None:
    command = [sys.executable, str(REPOSITORY / "tests" / "golden.py"), str(material / "data" / "golden" / case)]
    outcome = subprocess.run(
        command, cwd=REPOSITORY, env={"PYTHONPATH": str(REPOSITORY)}, capture_output=True, text=True, check=False
    )
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    assert outcome.stdout.count("largest difference") == 5
