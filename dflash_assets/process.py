"""Core commands that need torch, in a process of their own: a crash or an out-of-memory kill spares the run worker."""

import os
import signal
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, TypeVar

import dagster as dg
from pydantic import ValidationError

from dflash_core.records import CommandFailure, Record

AnyRecord = TypeVar("AnyRecord", bound=Record)

STOP_TIMEOUT_S = 120.0
"""Time to finish a step and save a checkpoint after the run was terminated."""
LAST_LINES = 15


def run_core(
    arguments: Iterable[str], result: type[AnyRecord], environment: Mapping[str, str] | None = None
) -> AnyRecord:
    """Run `python -m <arguments> --result FILE` and return the record it wrote to FILE.

    Its output goes to the run's compute logs. When the run is terminated the process gets SIGINT, time to save, and at
    last its whole group SIGKILL.

    Raises:
        dg.Failure: the command refused (its own sentence) or died (exit code and last lines).
    """
    with tempfile.TemporaryDirectory(prefix="dflash-") as folder:
        answer = Path(folder) / "result.json"
        process = subprocess.Popen(
            [sys.executable, "-m", *arguments, "--result", str(answer)],
            env={**os.environ, **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            assert process.stdout is not None
            last = _forward(process.stdout)
            code = process.wait()
        finally:
            _end(process)
        if code != 0:
            raise dg.Failure(_refusal(answer) or _death(code, last), allow_retries=False)
        return result.model_validate_json(answer.read_bytes())


def _forward(output: IO[str]) -> deque[str]:
    last: deque[str] = deque(maxlen=LAST_LINES)
    for line in output:
        sys.stderr.write(line)
        last.append(line)
    return last


def _end(process: "subprocess.Popen[str]") -> None:
    try:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=STOP_TIMEOUT_S)  # reads on, or a talkative process would block on its pipe
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _refusal(answer: Path) -> str | None:
    try:
        return CommandFailure.model_validate_json(answer.read_bytes()).error
    except (OSError, ValidationError):
        return None


def _death(code: int, last: deque[str]) -> str:
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return f"the process {how}; its last lines:\n{''.join(last)}"
