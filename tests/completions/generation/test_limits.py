"""The limit finds what a server bears, backs off once a round, and lets a failing server rest."""

from dflash_core.completions.generation.limits import START, Limit


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def fill(limit: Limit, clock: Clock) -> float:
    while limit.free > 0:
        limit.take()
    return clock.now


def rounds(limit: Limit, clock: Clock, capacity: int, count: int) -> None:
    """Fill the limit, wait a second, and have the server answer as many as it bears."""
    for _ in range(count):
        sent = fill(limit, clock)
        clock.now += 1
        for number in range(limit.in_flight):
            if number < capacity:
                limit.answered(sent)
            else:
                limit.overloaded(sent)
            limit.give()


def test_it_reaches_the_most_within_a_few_rounds() -> None:
    clock = Clock()
    limit = Limit(256, 60, clock)
    assert limit.allowed == START
    rounds(limit, clock, 256, 4)
    assert limit.allowed == 256


def test_it_settles_around_what_the_server_bears() -> None:
    clock = Clock()
    limit = Limit(256, 60, clock)
    rounds(limit, clock, 100, 30)
    seen = []
    for _ in range(100):
        rounds(limit, clock, 100, 1)
        seen.append(limit.allowed)
    assert min(seen) >= 60
    assert max(seen) <= 102
    assert sum(seen) / len(seen) > 75


def test_many_refusals_of_one_round_count_once() -> None:
    clock = Clock()
    limit = Limit(100, 60, clock)
    for _ in range(30):
        limit.overloaded(sent_at=0.0)
    assert limit.allowed == int(START * 0.67)


def test_slow_answers_are_a_sign_of_overload() -> None:
    clock = Clock()
    limit = Limit(100, 5, clock)
    for _ in range(20):
        sent = fill(limit, clock)
        clock.now += 10
        for _ in range(limit.in_flight):
            limit.answered(sent)
            limit.give()
    assert limit.allowed == 1


def test_a_server_that_fails_rests_longer_and_longer_and_comes_back() -> None:
    clock = Clock()
    limit = Limit(100, 60, clock)
    rests = []
    for _ in range(12):
        sent = clock.now
        clock.now += 0.1
        limit.failed(sent)
        rests.append(max(0.0, limit.rest_until - clock.now))
        clock.now = max(clock.now, limit.rest_until)
    assert rests[:2] == [0.0, 0.0]
    assert rests[2:] == sorted(rests[2:])
    assert max(rests) == 30.0
    limit.answered(clock.now)
    limit.failed(clock.now + 1)
    assert limit.free > 0


def test_it_is_left_alone_as_long_as_it_asks() -> None:
    clock = Clock()
    limit = Limit(100, 60, clock)
    limit.overloaded(0.0, rest_s=3.0)
    clock.now = 2.9
    assert limit.free == 0
    clock.now = 3.0
    assert limit.free > 0
