"""What is on its way from a device is waited for, but not for ever."""

import time
from typing import Any

import pytest
import torch

from dflash_core.training.arrival import Arrival, StepOverdue


class Later:
    """A CUDA event that has passed at the n-th question; None: it never does."""

    def __init__(self, passes: int | None) -> None:
        self.passes = passes
        self.asked = 0
        self.slept = False

    def query(self) -> bool:
        self.asked += 1
        return self.passes is not None and self.asked >= self.passes

    def synchronize(self) -> None:
        assert self.passes is not None, "it sleeps in the driver, for ever"
        self.slept = True


def arrival(event: Later, patience_s: float | None) -> Arrival:
    on_the_way: Any = Arrival(torch.arange(3), patience_s)
    on_the_way._done = event
    return on_the_way  # type: ignore[no-any-return]


@pytest.mark.parametrize("passes", [1, 4])
def test_what_comes_is_handed_out_as_soon_as_it_is_there(passes: int) -> None:
    event = Later(passes)
    assert arrival(event, 60.0).wait().tolist() == [0, 1, 2]
    assert event.asked == passes


def test_what_never_comes_ends_the_wait_with_its_reason() -> None:
    began = time.monotonic()
    with pytest.raises(StepOverdue, match=r"within 0\.05 s: it waits for a rank that hangs.*placement\.timeout_s"):
        arrival(Later(None), 0.05).wait()
    assert 0.05 <= time.monotonic() - began < 30


def test_alone_a_step_may_take_as_long_as_it_likes() -> None:
    event = Later(1)
    assert arrival(event, None).wait().tolist() == [0, 1, 2]
    assert event.slept


def test_on_a_cpu_it_is_there_already() -> None:
    assert Arrival(torch.arange(3), 60.0).wait().tolist() == [0, 1, 2]
