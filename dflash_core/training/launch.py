"""Starts training as processes: `python -m dflash_core.training.launch --recipe R`, for the CLI and the asset layer.

One drafter trains in this process; several under torchrun, one process each, in a session of their own, so that a
signal reaches this process alone. It asks them to stop through a file that they look for at each step; if it dies, they
die.
Exit codes: 0 done, 2 refused (one sentence says why), 75 stopped with a checkpoint saved, anything else: a crash.
"""

import argparse
import errno
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import torch

from dflash_core.errors import StorageError, TrainingStopped, UserError
from dflash_core.recipe import Recipe, load_recipe
from dflash_core.records import CommandFailure, DrafterCheckpoint, Record
from dflash_core.storage.embedded import store_of
from dflash_core.training.agent import die_with_parent
from dflash_core.training.placement import join
from dflash_core.training.progress import Report, report_steps
from dflash_core.training.run import train_drafter
from dflash_core.training.trainer import StopRequest

log = logging.getLogger(__name__)

KILL_AFTER_S = 10.0
SHUTDOWN_TIMEOUT_S = 5
"""Between the death of one rank and the killing of those that do not end."""
INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Train as the arguments say; returns the exit code."""
    options = _parse(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    if options.pipes or options.session is not None:
        die_with_parent()
    try:
        recipe = load_recipe(options.recipe)
        with _readable_failures(recipe):
            if options.session is not None:
                return _worker(recipe, options)
            with store_of(recipe):
                checkpoint = _train(recipe, options)
    except UserError as error:
        _answer(options.result, CommandFailure(error=str(error)))
        log.error("%s", error)
        return error.exit_code
    _answer(options.result, checkpoint)
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m dflash_core.training.launch", description=__doc__)
    parser.add_argument("--recipe", type=Path, required=True)
    parser.add_argument("--training-set", help="hash; default: the one frozen last")
    parser.add_argument("--accept-failed-gate", action="store_true", help="recorded in the checkpoint")
    parser.add_argument("--result", type=Path, help="write the checkpoint's record, or the refusal, here as JSON")
    parser.add_argument("--pipes", action="store_true", help="report to the Dagster run that started this process")
    parser.add_argument("--session", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def _train(recipe: Recipe, options: argparse.Namespace) -> DrafterCheckpoint:
    if len(recipe.training.placement.drafters) > 1:
        return _under_torchrun(recipe, options)
    stop = StopRequest()
    with stop_on_signals(stop), report_steps(options.pipes) as report:
        return _train_here(recipe, options, stop, report)


def _train_here(recipe: Recipe, options: argparse.Namespace, stop: StopRequest, report: Report) -> DrafterCheckpoint:
    return train_drafter(recipe, options.training_set, options.accept_failed_gate, report, stop)


def _under_torchrun(recipe: Recipe, options: argparse.Namespace) -> DrafterCheckpoint:
    """One process per drafter. The lead's answer comes back through the session folder."""
    with tempfile.TemporaryDirectory(prefix="dflash-train-") as folder:
        session = Path(folder)
        command = [sys.executable, "-m", "dflash_core.training.agent", "--standalone", "--max-restarts=0"]
        command += [f"--shutdown-timeout={SHUTDOWN_TIMEOUT_S}"]
        command += [f"--nproc-per-node={len(recipe.training.placement.drafters)}", "-m", "dflash_core.training.launch"]
        command += ["--recipe", str(options.recipe), "--session", str(session)]
        command += ["--training-set", options.training_set] if options.training_set else []
        command += [flag for flag, on in _flags(options) if on]
        threads = {"OMP_NUM_THREADS": str(recipe.training.placement.threads or 1)}
        process = subprocess.Popen(command, env={**os.environ, **threads}, start_new_session=True)
        stop = StopRequest(session / "stop")
        try:
            with stop_on_signals(stop):
                code = process.wait()
        finally:
            _end(process)
        answer = session / "answer.json"
        if not answer.exists():
            raise RuntimeError(f"the training processes ended with exit code {code}; their output above says why")
        table = json.loads(answer.read_text(encoding="utf8"))
        if "error" in table:
            kind = TrainingStopped if table["stopped"] else UserError
            raise kind(table["error"])
        return DrafterCheckpoint.model_validate(table)


def _worker(recipe: Recipe, options: argparse.Namespace) -> int:
    """One process under torchrun. Stopping is no failure here: all ranks stop together."""
    session: Path = options.session
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the starter decides, through the file
    rank, _ = join(recipe.training.placement)
    answer = session / "answer.json"
    try:
        with report_steps(options.pipes, rank == 0) as report:
            checkpoint = _train_here(recipe, options, StopRequest(session / "stop"), report)
    except UserError as error:
        stopped = isinstance(error, TrainingStopped)
        if rank == 0 or not answer.exists():
            _write(answer, json.dumps({"error": str(error), "stopped": stopped}))
        return 0 if stopped else error.exit_code
    if rank == 0:
        _write(answer, checkpoint.model_dump_json())
    return 0


@contextmanager
def stop_on_signals(stop: StopRequest) -> Iterator[None]:
    """SIGINT and SIGTERM ask for an end after the running step; a second one ends the process at once."""

    def handle(number: int, frame: FrameType | None) -> None:
        if stop.asked:
            os._exit(INTERRUPTED)
        os.write(2, b"stopping after this step; once more to stop without saving\n")
        stop.ask()

    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, handle) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


@contextmanager
def _readable_failures(recipe: Recipe) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise UserError(
            f"a device has too little memory: {str(error).splitlines()[0]} Lower training.batch_rows or "
            "training.anchors, or set training.gradient_checkpointing"
        ) from error
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EFBIG):
            raise
        raise StorageError(
            f"cannot write below storage.work_dir {recipe.storage.work_dir}: {error}; free disk space or set another "
            "folder, then run the same command again"
        ) from error


def _flags(options: argparse.Namespace) -> list[tuple[str, bool]]:
    return [("--accept-failed-gate", options.accept_failed_gate), ("--pipes", options.pipes)]


def _end(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(KILL_AFTER_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _answer(result: Path | None, record: Record) -> None:
    if result is not None:
        _write(result, record.model_dump_json())


def _write(path: Path, text: str) -> None:
    aside = path.with_name(f".{path.name}")
    aside.write_text(text, encoding="utf8")
    os.replace(aside, path)


if __name__ == "__main__":
    sys.exit(main())
