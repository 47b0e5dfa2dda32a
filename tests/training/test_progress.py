"""What people see of a step: one line that holds all that matters, seldom but never too late."""

from types import SimpleNamespace

import pytest

from dflash_core.training import progress
from dflash_core.training.metrics import StepMetrics
from dflash_core.training.progress import describe, duration, every
from tests.training.test_trackers import metrics


def test_a_line_says_where_how_well_and_how_fast() -> None:
    assert describe(metrics(3)) == (
        "step 3/9, loss 2.000, accepted prefix 1.50, lr 1.00e-03, gradient 0.70, 50 tokens/s, waiting 10%, 0:03 left, "
        "held out: loss 1.900, prefix 1.70, acceptance length 1.60"
    )
    assert describe(metrics(2, None)).startswith("step 2/9, skipped (not finite), accepted prefix")
    assert [duration(s) for s in (3.4, 61, 3600 * 30 + 62)] == ["0:03", "1:01", "30:01:02"]


def test_the_first_the_last_and_whatever_was_measured_or_skipped_is_shown() -> None:
    shown: list[StepMetrics] = []
    report = every(3600.0, shown.append)
    for step in range(1, 10):
        report(metrics(step, None if step == 6 else 2.0))
    assert [m.step for m in shown] == [1, 3, 6, 9]
    assert [m.acceptance_length for m in shown] == [None, 1.6, None, None]


def test_others_are_shown_once_in_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now, shown = 0.0, list[int]()
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now))
    report = every(5.0, lambda metrics: shown.append(metrics.step))
    for _ in range(8):
        now += 2.0
        report(metrics(2))
    assert len(shown) == 3  # after 2, 8 and 14 seconds
