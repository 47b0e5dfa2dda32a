"""The learning rate."""

from itertools import pairwise

from dflash_core.recipe import Training
from dflash_core.training.schedule import learning_rate


def rates(schedule: str, steps: int = 200) -> list[float]:
    training = Training(learning_rate=1.0, warmup_share=0.1, schedule=schedule)  # type: ignore[arg-type]
    return [learning_rate(step, steps, training) for step in range(steps)]


def test_both_schedules_warm_up_to_the_peak_and_fall_to_almost_nothing() -> None:
    for schedule in ("cosine", "wsd"):
        got = rates(schedule)
        assert got[:20] == [(i + 1) / 20 for i in range(20)]
        assert max(got) == got[19] == 1.0
        assert all(a >= b for a, b in pairwise(got[19:]))
        assert 0 < got[-1] < 0.04


def test_cosine_is_half_in_the_middle_and_wsd_still_at_the_peak() -> None:
    assert abs(rates("cosine")[110] - 0.5) < 1e-12
    assert rates("wsd")[110] == rates("wsd")[163] == 1.0
    assert rates("wsd")[166] < 1.0


def test_one_step_has_a_rate() -> None:
    assert learning_rate(0, 1, Training()) > 0
