"""1,805 files through the daemon: overhead, database, memory and page times within their bars."""

import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.scale, pytest.mark.timeout(2400)]


def test_a_backfill_of_1805_files_stays_within_its_bars(material: Path, tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/backfill.py", "--tokenizer", str(material / "tokenizers/qwen3.6")]
    command += ["--json", str(tmp_path / "numbers.json"), "--work", str(tmp_path), "--pages"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
