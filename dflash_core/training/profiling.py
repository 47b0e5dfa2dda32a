"""`dflash train --profile`: a trace of a few steps, and what share of them is target, drafter, objective, update.

The trade-off: shares are of the host's time, so they are told of a training on the CPU alone: on CUDA the host only
launches, and what the device did is to be seen in the trace; one of more steps would be too large to open.
"""

import gzip
import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from dflash_core.training.metrics import OnStep, StepMetrics

log = logging.getLogger(__name__)

PARTS = ("target", "drafter", "objective", "backward", "update")
"""Names of the regions that the step marks; `backward` is the drafter's, the objective's is in `objective`."""
SKIPPED, TRACED = 4, 4
"""Steps before the trace begins (compilation, allocation), and in it."""


@contextmanager
def profiled(trace: Path) -> Iterator[OnStep]:
    """Trace the steps that the yielded function is told of; writes a Chrome trace, gzipped, and logs the shares.

    Where there are too few steps for that, a warning says so.
    """
    done = 0

    def ready(profiler: profile) -> None:
        if done > SKIPPED:
            _write(profiler, trace, min(done - SKIPPED, TRACED))

    trace.parent.mkdir(parents=True, exist_ok=True)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    when = schedule(wait=SKIPPED - 1, warmup=1, active=TRACED, repeat=1)
    with profile(activities=activities, schedule=when, on_trace_ready=ready) as profiler:

        def step(_metrics: StepMetrics) -> None:
            nonlocal done
            done += 1
            profiler.step()

        yield step
    if done <= SKIPPED:
        warn_of_no_trace(done)


def warn_of_no_trace(steps: int) -> None:
    """Say that this training had only so many steps left, too few for a trace."""
    log.warning(
        "no trace was written: this training had %d steps left and a trace begins after the first %d; give the "
        "recipe another name to train from the beginning",
        steps,
        SKIPPED,
    )


def shares(profiler: profile) -> dict[str, float] | None:
    """Share of each part in the host's time of all parts; None where a device computed."""
    events = profiler.key_averages()
    if any(event.device_time_total for event in events):
        return None
    times = {event.key: float(event.cpu_time_total) for event in events if event.key in PARTS}
    total = sum(times.values()) or 1.0
    return {name: times.get(name, 0.0) / total for name in PARTS}


def _write(profiler: profile, trace: Path, steps: int) -> None:
    plain = trace.with_suffix("")
    profiler.export_chrome_trace(str(plain))
    with plain.open("rb") as source, gzip.open(trace, "wb") as packed:
        shutil.copyfileobj(source, packed)
    plain.unlink()
    found = shares(profiler)
    parts = "no shares on CUDA" if found is None else ", ".join(f"{name} {share:.0%}" for name, share in found.items())
    log.info("profile of %d steps: %s; trace for chrome://tracing or Perfetto: %s", steps, parts, trace)
