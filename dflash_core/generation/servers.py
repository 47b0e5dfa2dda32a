"""All servers together: every request goes to the one with the fewest in flight, and again where that is worth it.

Overload (429, 503, timeouts) slows down and waits; failures (resets, 500, half answers) are tried again a few times
with back-off and jitter; a refusal is this prompt's own and final. A server that fails again and again rests. Only when
nobody has answered for `patience_s`, or a server refuses key, model or path, does everything stop.
"""

import asyncio
import math
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Literal

from dflash_core.errors import UserError
from dflash_core.generation.answers import Answer, Plan, Request
from dflash_core.generation.client import ServerConnection, Trouble
from dflash_core.generation.prompt_file import Prompt
from dflash_core.recipe import GenerationSettings

START = 32
SHRINK = 0.67
SMOOTHING = 0.1
FAILURES_BEFORE_REST = 3
LONGEST_REST_S = 30.0
FIRST_WAIT_S = 0.5
LONGEST_WAIT_S = 30.0
LOOK_AGAIN_S = 0.5
"""How often somebody who waits for a permit looks whether a rest is over."""


@dataclass
class RequestLimit:
    """How many requests one server bears: additive increase, multiplicative decrease, and rests where it fails.

    Starts low and doubles with every round of answers until the first sign of overload (429, 503, a timeout, answers
    that take more than half of their timeout); then it grows by one a round and shrinks by a third at each sign, once a
    round: requests that were sent before the last decrease say nothing about the present limit. Times are those of
    `clock`, in seconds.
    """

    most: int
    slow_s: float
    """Answers that take longer than this on average are a sign of overload."""
    clock: Callable[[], float]
    in_flight: int = 0
    rest_until: float = 0.0
    _allowed: float = field(init=False)
    _busiest: int = 0
    _seconds: float = 0.0
    _failures: int = 0
    _doubling: bool = True
    _shrunk_at: float = -math.inf
    _failed_at: float = -math.inf

    def __post_init__(self) -> None:
        self._allowed = float(min(START, self.most))

    @property
    def allowed(self) -> int:
        """Requests that may be in flight now, rests left aside."""
        return int(self._allowed)

    @property
    def free(self) -> int:
        """How many more may be sent now."""
        return 0 if self.clock() < self.rest_until else self.allowed - self.in_flight

    def take(self) -> None:
        """A request is sent."""
        self.in_flight += 1
        self._busiest = max(self._busiest, self.in_flight)

    def give(self) -> None:
        """A request is over."""
        self.in_flight -= 1

    def answered(self, sent_at: float) -> None:
        """An answer came to a request that was sent at this time."""
        self._failures = 0
        seconds = self.clock() - sent_at
        self._seconds = seconds if not self._seconds else self._seconds + SMOOTHING * (seconds - self._seconds)
        if self._seconds > self.slow_s:
            self.overloaded(sent_at)
        elif self._allowed < 2 * self._busiest:  # a limit that nobody comes near says nothing about a higher one
            self._allowed = min(float(self.most), self._allowed + (1.0 if self._doubling else 1.0 / self._allowed))

    def overloaded(self, sent_at: float, rest_s: float = 0.0) -> None:
        """The server said, or showed, that it has too much to do; `rest_s`: how long it asks to be left alone."""
        self.rest_until = max(self.rest_until, self.clock() + min(rest_s, LONGEST_REST_S))
        if sent_at > self._shrunk_at:
            self._allowed = max(1.0, self._allowed * SHRINK)
            self._doubling, self._busiest = False, self.in_flight
            self._shrunk_at = self.clock()

    def failed(self, sent_at: float) -> None:
        """No usable answer: refused connections, resets, 500. Several rounds in a row earn a rest, longer each time."""
        if sent_at <= self._failed_at:
            return
        self._failures, self._failed_at = self._failures + 1, self.clock()
        if self._failures >= FAILURES_BEFORE_REST:
            rest_s = min(LONGEST_REST_S, 0.5 * 2.0 ** min(self._failures - FAILURES_BEFORE_REST, 10))
            self.rest_until = max(self.rest_until, self.clock() + rest_s)


class ServersGone(UserError):
    """No server has answered for longer than the recipe's patience; what was answered is kept."""

    exit_code = 75


@dataclass(frozen=True)
class NoAnswer:
    """A prompt that got no answer, and why."""

    refused: bool
    """By the server, for good; else nothing worked within the recipe's attempts and time."""
    reason: str

    @property
    def outcome(self) -> Literal["refused", "unanswered"]:
        """What the prompt counts as."""
        return "refused" if self.refused else "unanswered"


@dataclass
class LimitedServer:
    """One server and what it bears."""

    connection: ServerConnection
    limit: RequestLimit


class Servers:
    """The recipe's servers. Belongs to one event loop."""

    def __init__(self, connections: list[ServerConnection], generation: GenerationSettings) -> None:
        self._generation = generation
        slow_s = generation.request_timeout_s / 2
        self._servers = [
            LimitedServer(c, RequestLimit(generation.concurrency, slow_s, time.monotonic)) for c in connections
        ]
        self._turn = asyncio.Condition()
        self._sent: dict[object, float] = {}
        """When each request in flight was sent."""
        self._troubled_since: float | None = None
        """The first trouble after the last answer."""
        self._jitter = random.Random()
        self.last_trouble = ""

    @property
    def in_flight(self) -> int:
        """Requests sent and not answered."""
        return sum(server.limit.in_flight for server in self._servers)

    @property
    def allowed(self) -> int:
        """Requests that the servers seem to bear now."""
        return sum(server.limit.allowed for server in self._servers)

    @property
    def connections(self) -> list[ServerConnection]:
        """One a server."""
        return [server.connection for server in self._servers]

    async def ask(self, prompt: Prompt, request: Request, plan: Plan) -> Answer | NoAnswer:
        """The answer to one request, however many tries that takes.

        Raises:
            ServersGone: nobody has answered anything for `patience_s`.
            ServerRefuses: key, model, path or address are wrong.
        """
        failures, wait_s, trouble = 0, FIRST_WAIT_S, ""
        try:
            async with asyncio.timeout(self._generation.total_timeout_s):
                while True:
                    async with self._permit() as server:
                        found = await self._try(server, prompt, request, plan)
                    if isinstance(found, Answer):
                        return found
                    trouble = str(found)
                    failures += found.kind == "failed"
                    if found.kind == "refused":
                        return NoAnswer(True, trouble)
                    if failures >= self._generation.attempts:
                        return NoAnswer(False, f"{failures} tries failed, the last with {trouble}")
                    await asyncio.sleep(max(min(found.rest_s, LONGEST_REST_S), wait_s) * self._jitter.uniform(0.5, 1.0))
                    wait_s = min(LONGEST_WAIT_S, 2 * wait_s)
        except TimeoutError:
            return NoAnswer(
                False, f"no answer within {self._generation.total_timeout_s:g} s; {trouble or 'in the queue'}"
            )

    async def close(self) -> None:
        """Close all connections."""
        for server in self._servers:
            await server.connection.close()

    async def _try(self, server: LimitedServer, prompt: Prompt, request: Request, plan: Plan) -> Answer | Trouble:
        sent_at = time.monotonic()
        try:
            answer = await self._send(server, prompt, request, plan)
        except Trouble as trouble:
            if trouble.kind == "refused":
                server.limit.answered(sent_at)
                self._troubled_since = None
                return trouble
            if trouble.kind == "overloaded":
                server.limit.overloaded(sent_at, trouble.rest_s)
            else:
                server.limit.failed(sent_at)
            self.last_trouble = f"{server.connection.url}: {trouble}"
            self._check_patience(timed_out=trouble.timed_out)
            return trouble
        server.limit.answered(sent_at)
        self._troubled_since = None
        return answer

    async def _send(self, server: LimitedServer, prompt: Prompt, request: Request, plan: Plan) -> Answer:
        ticket = object()
        self._sent[ticket] = time.monotonic()
        try:
            return await server.connection.ask(prompt, request, plan)
        finally:
            del self._sent[ticket]

    def _check_patience(self, *, timed_out: bool) -> None:
        now = time.monotonic()
        if self._troubled_since is None:
            self._troubled_since = now
        if any(sent_at < self._troubled_since for sent_at in self._sent.values()):
            return  # long answers may still come to what was sent before
        silent_s = now - self._troubled_since
        patience_s = self._generation.patience_s
        if timed_out:  # one prompt that is never answered in time tells nothing of the server: its own time ends first
            patience_s = max(patience_s, self._generation.total_timeout_s)
        if silent_s > patience_s:
            raise ServersGone(
                f"no server has answered for {silent_s:.0f} s, the last trouble was {self.last_trouble}; "
                "what was answered is kept: run the same again when they are back"
            )

    @asynccontextmanager
    async def _permit(self) -> AsyncIterator[LimitedServer]:
        """The server with the fewest requests in flight, once one bears another."""
        server = await self._take()
        try:
            yield server
        finally:
            server.limit.give()
            async with self._turn:
                self._turn.notify(max(1, sum(max(0, s.limit.free) for s in self._servers)))

    async def _take(self) -> LimitedServer:
        while True:
            free = [server for server in self._servers if server.limit.free > 0]
            if free:
                server = min(free, key=lambda s: s.limit.in_flight)
                server.limit.take()
                return server
            async with self._turn:
                try:
                    await asyncio.wait_for(self._turn.wait(), LOOK_AGAIN_S)
                except TimeoutError:
                    continue
