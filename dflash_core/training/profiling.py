"""`dflash train --profile`: a trace of a few steps, and what share of them is target, drafter, objective, update.

The trade-off: shares are of the host's time on a CPU and of the device's on CUDA, summed over the devices; a trace of
more steps would say the same and be too large to open.
"""

import gzip
import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from dflash_core.training.metrics import Report, StepMetrics

log = logging.getLogger(__name__)

PARTS = ("target", "drafter", "objective", "backward", "update")
"""Names of the regions that the step marks; `backward` is the drafter's, the objective's is in `objective`."""
SKIPPED, TRACED = 3, 4
"""Steps before the trace begins (compilation, allocation), and in it."""


@contextmanager
def profiled(trace: Path) -> Iterator[Report]:
    """Trace the steps that the yielded function is told of; writes a Chrome trace, gzipped, and logs the shares."""
    trace.parent.mkdir(parents=True, exist_ok=True)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    when = schedule(wait=SKIPPED, warmup=1, active=TRACED, repeat=1)
    with profile(activities=activities, schedule=when, on_trace_ready=lambda ready: _write(ready, trace)) as profiler:

        def step(_metrics: StepMetrics) -> None:
            profiler.step()

        yield step


def shares(profiler: profile) -> dict[str, float]:
    """Share of each part in the time of all parts."""
    averages = {event.key: event for event in profiler.key_averages() if event.key in PARTS}
    on_device = any(event.device_time_total for event in averages.values())
    times = {
        name: float(event.device_time_total if on_device else event.cpu_time_total) for name, event in averages.items()
    }
    total = sum(times.values()) or 1.0
    return {name: times.get(name, 0.0) / total for name in PARTS}


def _write(profiler: profile, trace: Path) -> None:
    plain = trace.with_suffix("")
    profiler.export_chrome_trace(str(plain))
    with plain.open("rb") as source, gzip.open(trace, "wb") as packed:
        shutil.copyfileobj(source, packed)
    plain.unlink()
    parts = ", ".join(f"{name} {share:.0%}" for name, share in shares(profiler).items())
    log.info("profile of %d steps: %s; trace for chrome://tracing or Perfetto: %s", TRACED, parts, trace)
