"""What people see of a step: one line that holds all that matters, seldom but never too late."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from dflash_core.training import progress
from dflash_core.training.metrics import StepMetrics
from dflash_core.training.progress import describe, report_steps
from tests.training.test_trackers import metrics


def test_a_line_says_where_how_well_and_how_fast() -> None:
    assert describe(metrics(3)) == (
        "step 3/9, loss 2.000, accepted prefix 1.50, lr 1.00e-03, gradient 0.70, 50 tokens/s, waiting 10%, 0:03 left, "
        "held out: loss 1.900, prefix 1.70, acceptance length 1.60"
    )
    assert describe(metrics(2, None)).startswith("step 2/9, skipped (not finite), accepted prefix")


def test_dagster_gets_lines_and_numbers_of_the_first_the_last_and_whatever_was_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines: list[str] = []
    numbers: list[dict[str, float]] = []

    class Pipes:
        class log:  # noqa: N801  the name that Pipes gives it
            info = staticmethod(lines.append)

        report_custom_message = staticmethod(numbers.append)

    @contextmanager
    def opened() -> Iterator[type[Pipes]]:
        yield Pipes

    monkeypatch.setattr(progress.dagster_pipes, "open_dagster_pipes", opened)
    with report_steps(pipes=True) as report:
        for step in range(1, 10):
            report(metrics(step))
    seen = [line.split(",")[0] for line in lines]
    assert seen == ["step 1/9", "step 3/9", "step 9/9"]
    assert [n.get("held_out/acceptance_length") for n in numbers] == [None, 1.6, None]


def test_only_the_lead_reports() -> None:
    with report_steps(pipes=False, lead=False) as report:
        step: StepMetrics = metrics(1)
        report(step)
