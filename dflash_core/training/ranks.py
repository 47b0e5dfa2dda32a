"""Training in child processes, one rank for each drafter; without torch, which only the children import.

The starter talks to them through `processes`: they tell their steps, and a signal to the starter asks all of them to
stop. When one dies, hangs or refuses, the others would wait for it in the next sum, so they are ended, and the message
names the one.
"""

import math
import signal
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from dflash_core.errors import ProcessDied, UserError
from dflash_core.processes import Answered, Child, Died, Parent, Refused, Told, listen, start, wind_down
from dflash_core.records import DrafterCheckpoint
from dflash_core.training.job import Job, Rank, StopRequest
from dflash_core.training.metrics import OnStep
from dflash_core.training.progress import describe
from dflash_core.workspace import Workspace

GRACE_S = 5.0
"""Between the first end of a rank and the killing of those that have not ended."""
MISSED_S = 3.0
"""A rank not heard of for so long when the others had to be ended is the one that they waited for."""
STOP_TIMEOUT_S = 120.0
"""To finish a step and save a checkpoint."""
LONGEST_REASON = 300


def train_in_ranks(
    workspace: Workspace, job: Job, on_step: OnStep, stop: StopRequest | None = None
) -> DrafterCheckpoint:
    """Like `train.train`, in one child process for each drafter of the recipe.

    An exception in the starter (a terminated Dagster run, say) asks them to stop and lets them save.

    Raises:
        UserError: what the ranks refused, or TrainingStopped.
        ProcessDied: a rank crashed, was killed or hung; the others were ended.
    """
    placement = workspace.recipe.training.placement
    count = len(placement.drafters)
    with tempfile.TemporaryDirectory(prefix="dflash-train-") as folder:
        # Several ranks on one machine would otherwise take all cores each.
        environment = {"OMP_NUM_THREADS": str(placement.threads or 1)} if count > 1 else {}
        children = [
            start(
                _train_rank,
                workspace,
                job,
                Rank(number, count, Path(folder) / "rendezvous" if count > 1 else None),
                name=f"rank {number}",
                environment=environment,
                keep_output=True,
            )
            for number in range(count)
        ]
        try:
            return _await_ranks(children, on_step, stop or StopRequest(), placement.timeout_s)
        except UserError:
            raise
        except BaseException:
            wind_down(children, on_step, STOP_TIMEOUT_S)
            raise
        finally:
            for child in children:
                child.end()


def _train_rank(parent: Parent, workspace: Workspace, job: Job, rank: Rank) -> DrafterCheckpoint:
    stop = StopRequest()
    # The starter alone decides, and tells us with SIGINT. A signal that a service manager sends to every process must
    # not count as its second one, which ends a training without saving.
    signal.signal(signal.SIGINT, lambda _number, _frame: stop.ask())
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    from dflash_core.training.train import train  # imports torch, which whoever starts a training need not

    return train(workspace, job, parent.tell, stop, rank)


def _await_ranks(children: Sequence[Child], on_step: OnStep, stop: StopRequest, patience_s: float) -> DrafterCheckpoint:
    """Listen until all ranks have ended, or one has and the others do not follow."""
    checkpoint: DrafterCheckpoint | None = None
    refusals: list[UserError] = []
    ends: dict[Child, str] = {}
    killed: list[Child] = []
    give_up_at, asked = math.inf, False
    while not all(child.ended for child in children) and time.monotonic() < give_up_at:
        if stop.asked and not asked:
            asked = True
            for child in children:
                child.ask_to_stop()
        for child, news in listen(children):
            if isinstance(news, Told):
                child.last_lines.append(f"{describe(news.value)}\n")
                on_step(news.value)
                continue
            give_up_at = min(give_up_at, time.monotonic() + GRACE_S)
            if isinstance(news, Answered):
                checkpoint = news.value
            elif isinstance(news, Refused):
                refusals.append(news.error)
                ends[child] = str(news.error)
            elif isinstance(news, Died):
                ends[child] = news.reason
                if (child.process.poll() or 0) < 0:
                    killed.append(child)
        if any(not child.ended and child.silent_s >= patience_s for child in children):
            break
    if checkpoint is not None:
        return checkpoint
    if refusals:
        raise refusals[0]
    raise ProcessDied(_who_died(children, ends, killed, patience_s))


def _who_died(children: Sequence[Child], ends: dict[Child, str], killed: Sequence[Child], patience_s: float) -> str:
    """The rank that was killed; else the one that is silent; else the one that the others, which failed, waited for.

    One that is on its way out because of the others may be silent for seconds, too, but never for so long.
    """
    running = [child for child in children if not child.ended]
    silent = [child for child in running if child.silent_s >= patience_s]
    silent = silent or [child for child in running if child.silent_s >= MISSED_S]
    suspects = [*killed] or silent or [child for child in children if child not in ends]
    if len(children) == 1:
        why = f"its process {ends.get(children[0], 'hung')}"
    elif suspects:
        why = f"{', '.join(child.name for child in suspects)} {'was killed' if killed else 'died or hung'}"
    else:
        why = "every rank failed"
    others = "; ".join(f"{child.name} {_short(ends[child])}" for child in children if child in ends)
    noticed = f" ({others})" if others and len(children) > 1 else ""
    return (
        f"training ended because {why}{noticed}; the checkpoints before are good, the same command continues from the "
        "last"
    )


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= LONGEST_REASON else line[:LONGEST_REASON] + " ..."
