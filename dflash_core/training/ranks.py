"""Training in several processes: one rank per drafter, under torchrun, in a session of their own.

A signal reaches the starter alone. It asks the ranks to stop through a file that they look for at each step; if it
dies, the kernel kills them. The trade-off: answers travel through files in a session folder, since torchrun hands on
neither exit codes nor results.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from torch import distributed

from dflash_core.errors import TrainingStopped, UserError
from dflash_core.recipe import Recipe, load_recipe
from dflash_core.records import DrafterCheckpoint
from dflash_core.training.agent import die_with_parent
from dflash_core.training.metrics import Report, StepMetrics
from dflash_core.training.placement import join
from dflash_core.training.probing import MakeProbe
from dflash_core.training.profiling import profiled
from dflash_core.training.progress import report_steps
from dflash_core.training.pulse import BEAT_S, Pulses, beating
from dflash_core.training.run import train_drafter
from dflash_core.training.trainer import StopRequest

GRACE_S = 5.0
"""Between the first failure of a rank and the killing of those that have not ended; torchrun itself would take 30 s."""
POLL_S = 0.5
MISSED_S = 3 * BEAT_S
"""A rank not heard of for so long when the others had to be ended is the one that they waited for."""
INTERRUPTED = 130
LONGEST_REASON = 300


@dataclass(frozen=True)
class Job:
    """What to train, see `train_drafter`."""

    recipe: Path
    training_set: str | None
    accept_failed_gate: bool
    pipes: bool
    profile: bool = False


class RanksDied(Exception):
    """A training process crashed or hung; the message says which."""


@dataclass(frozen=True)
class Session:
    """The folder through which starter and ranks talk."""

    folder: Path

    @property
    def stop(self) -> Path:
        """There once the ranks are asked to stop."""
        return self.folder / "stop"

    @property
    def answer(self) -> Path:
        """The checkpoint's record, or {"error", "stopped"}."""
        return self.folder / "answer.json"

    def pulse(self, rank: int) -> Path:
        """Touched by a rank as long as its process runs."""
        return self.folder / f"pulse-{rank}"

    def fail(self, rank: int, error: Exception) -> None:
        """Note that a rank ends early, so that the starter waits for the others no longer than it must."""
        write_whole(self.folder / f"failed-{rank}", " ".join(str(error).split())[:LONGEST_REASON])

    def failures(self) -> dict[int, str]:
        """Reasons by rank."""
        files = self.folder.glob("failed-*")
        return {int(file.name.removeprefix("failed-")): file.read_text(encoding="utf8") for file in files}

    def failed_for_s(self) -> float:
        """Seconds since the first failure, 0 if there is none."""
        times = [file.stat().st_mtime for file in self.folder.glob("failed-*")]
        return time.time() - min(times) if times else 0.0


def train_in_ranks(recipe: Recipe, job: Job) -> DrafterCheckpoint:
    """Train in one process per drafter.

    Raises:
        UserError: what the ranks refused, or TrainingStopped.
        RanksDied: a rank crashed, was killed or hung; the others were ended.
    """
    ranks = len(recipe.training.placement.drafters)
    with tempfile.TemporaryDirectory(prefix="dflash-train-") as folder:
        session = Session(Path(folder))
        command = [sys.executable, "-m", "dflash_core.training.agent", "--standalone", "--max-restarts=0"]
        command += [f"--nproc-per-node={ranks}", "-m", "dflash_core.train"]
        command += ["--recipe", str(job.recipe), "--session", folder]
        command += ["--training-set", job.training_set] if job.training_set else []
        command += ["--accept-failed-gate"] if job.accept_failed_gate else []
        command += ["--pipes"] if job.pipes else []
        command += ["--profile"] if job.profile else []
        threads = {"OMP_NUM_THREADS": str(recipe.training.placement.threads or 1)}
        pulses = Pulses([session.pulse(rank) for rank in range(ranks)])
        patience = recipe.training.placement.timeout_s / POLL_S
        process = subprocess.Popen(command, env={**os.environ, **threads}, start_new_session=True)
        try:
            with stop_on_signals(StopRequest(session.stop)):
                while process.poll() is None and session.failed_for_s() < GRACE_S and not pulses.silent(patience):
                    time.sleep(POLL_S)
                    pulses.look()
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # its ranks go with it, stopped ones too
                process.wait()
        if not session.answer.exists():
            raise RanksDied(_who_died(session.failures(), pulses.silent(MISSED_S / POLL_S), ranks))
        table = json.loads(session.answer.read_text(encoding="utf8"))
        if "error" in table:
            raise (TrainingStopped if table["stopped"] else UserError)(table["error"])
        return DrafterCheckpoint.model_validate(table)


def run_rank(job: Job, session: Session, make_probe: MakeProbe | None) -> int:
    """One rank's process, under torchrun; returns its exit code. All ranks stop together, so that is no failure."""
    die_with_parent()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the starter decides, through the file
    rank = distributed.get_node_local_rank()
    with beating(session.pulse(rank)):
        return _train(rank, job, session, make_probe)


def _train(rank: int, job: Job, session: Session, make_probe: MakeProbe | None) -> int:
    recipe = load_recipe(job.recipe)
    try:
        join(recipe.training.placement)
        with watching(recipe, job, rank == 0) as report:
            stop = StopRequest(session.stop)
            checkpoint = train_drafter(recipe, job.training_set, job.accept_failed_gate, report, stop, make_probe)
    except TrainingStopped as error:
        if rank == 0:
            write_whole(session.answer, json.dumps({"error": str(error), "stopped": True}))
        return 0
    except UserError as error:
        if rank == 0 or not session.answer.exists():
            write_whole(session.answer, json.dumps({"error": str(error), "stopped": False}))
        session.fail(rank, error)
        return error.exit_code
    except Exception as error:  # whatever ends a rank has to be told, or the others wait for it until they time out
        session.fail(rank, error)
        raise
    if rank == 0:
        write_whole(session.answer, checkpoint.model_dump_json())
    return 0


@contextmanager
def watching(recipe: Recipe, job: Job, lead: bool) -> Iterator[Report]:
    """Show the steps, and profile some of them where asked to."""
    with ExitStack() as stack:
        reports = [stack.enter_context(report_steps(job.pipes, lead))]
        if job.profile and lead:
            trace = recipe.storage.work_dir / "drafter_checkpoint" / f"{recipe.name}.trace.json.gz"
            reports.append(stack.enter_context(profiled(trace)))

        def report(metrics: StepMetrics) -> None:
            for each in reports:
                each(metrics)

        yield report


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


def write_whole(path: Path, text: str) -> None:
    """Write a file that is either there in full or not at all."""
    aside = path.with_name(f".{path.name}")
    aside.write_text(text, encoding="utf8")
    os.replace(aside, path)


def _who_died(failures: dict[int, str], without_pulse: list[int], ranks: int) -> str:
    suspects = without_pulse or [rank for rank in range(ranks) if rank not in failures]
    silent = ", ".join(map(str, suspects))
    why = f"rank {silent} died or hung" if silent else "every rank failed"
    noticed = "; ".join(f"rank {rank}: {text}" for rank, text in sorted(failures.items()))
    return (
        f"training ended because {why}{f' ({noticed})' if noticed else ''}; the checkpoints before are good, the same "
        "command continues from the last"
    )
