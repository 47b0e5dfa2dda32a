"""The limit finds what a server bears, backs off once a round, lets a failing server rest, and asks it again."""

import asyncio
from collections.abc import Callable

import pytest

from dflash_core.completions.completion import Message
from dflash_core.generation import servers as servers_module
from dflash_core.generation.answers import Answer, plan_of
from dflash_core.generation.client import ServerConnection, Trouble
from dflash_core.generation.prompt_file import Prompt
from dflash_core.generation.servers import START, NoAnswer, RequestLimit, Servers
from dflash_core.workspace import Workspace


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def fill(limit: RequestLimit, clock: Clock) -> float:
    while limit.free > 0:
        limit.take()
    return clock.now


def rounds(limit: RequestLimit, clock: Clock, capacity: int, count: int) -> None:
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
    limit = RequestLimit(256, 60, clock)
    assert limit.allowed == START
    rounds(limit, clock, 256, 4)
    assert limit.allowed == 256


def test_it_settles_around_what_the_server_bears() -> None:
    clock = Clock()
    limit = RequestLimit(256, 60, clock)
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
    limit = RequestLimit(100, 60, clock)
    for _ in range(30):
        limit.overloaded(sent_at=0.0)
    assert limit.allowed == int(START * 0.67)


def test_slow_answers_are_a_sign_of_overload() -> None:
    clock = Clock()
    limit = RequestLimit(100, 5, clock)
    for _ in range(20):
        sent = fill(limit, clock)
        clock.now += 10
        for _ in range(limit.in_flight):
            limit.answered(sent)
            limit.give()
    assert limit.allowed == 1


def test_a_server_that_fails_rests_longer_and_longer_and_comes_back() -> None:
    clock = Clock()
    limit = RequestLimit(100, 60, clock)
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
    limit = RequestLimit(100, 60, clock)
    limit.overloaded(0.0, rest_s=3.0)
    clock.now = 2.9
    assert limit.free == 0
    clock.now = 3.0
    assert limit.free > 0


def test_a_server_that_wants_to_be_left_alone_for_a_day_is_asked_again(
    workspace_on: Callable[..., Workspace], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers_module, "LONGEST_REST_S", 0.1)
    plan = plan_of(workspace_on("http://127.0.0.1:9/v1", total_timeout_s=20).recipe)
    prompt = Prompt(1, "1", (Message("user", "Hi?"),), (), "hash")
    good = Answer(
        content="Ho.", finish_reason="stop", prompt_tokens=1, completion_tokens=1, model="m", server="s", seconds=0.1
    )

    trouble = [Trouble("overloaded", "429", rest_s=86_400.0)]

    class Busy(ServerConnection):
        async def ask(self, *_: object) -> Answer:
            if trouble:
                raise trouble.pop()
            return good

    async def ask() -> Answer | NoAnswer:
        servers = Servers([Busy(plan.generation.servers[0], plan.generation, None)], plan.generation)
        return await servers.ask(prompt, plan.first(prompt), plan)

    assert asyncio.run(ask()) == good
