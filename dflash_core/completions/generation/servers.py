"""All servers together: every request goes to the one with the fewest in flight, and again where that is worth it.

Overload (429, 503, timeouts) slows down and waits; failures (resets, 500, half answers) are tried again a few times
with back-off and jitter; a refusal is this prompt's own and final. A server that fails again and again rests. Only when
nobody has answered for `patience_s`, or a server refuses key, model or path, does everything stop.
"""

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Literal

from dflash_core.completions.generation.answers import Answer, Plan, Request
from dflash_core.completions.generation.limits import LONGEST_REST_S, Limit
from dflash_core.completions.generation.prompts import Prompt
from dflash_core.completions.generation.wire import Connection, Trouble
from dflash_core.errors import UserError
from dflash_core.recipe import Generation

FIRST_WAIT_S = 0.5
LONGEST_WAIT_S = 30.0
LOOK_AGAIN_S = 0.5
"""How often somebody who waits for a slot looks whether a rest is over."""


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
class Server:
    """One server and what it bears."""

    connection: Connection
    limit: Limit


class Servers:
    """The recipe's servers. Belongs to one event loop."""

    def __init__(self, connections: list[Connection], generation: Generation) -> None:
        self._generation = generation
        slow_s = generation.request_timeout_s / 2
        self._servers = [Server(c, Limit(generation.concurrency, slow_s, time.monotonic)) for c in connections]
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
    def connections(self) -> list[Connection]:
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
                    async with self._slot() as server:
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

    async def _try(self, server: Server, prompt: Prompt, request: Request, plan: Plan) -> Answer | Trouble:
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

    async def _send(self, server: Server, prompt: Prompt, request: Request, plan: Plan) -> Answer:
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
        if (
            timed_out
        ):  # one prompt that is never answered in time says nothing about the server: its own time ends first
            patience_s = max(patience_s, self._generation.total_timeout_s)
        if silent_s > patience_s:
            raise ServersGone(
                f"no server has answered for {silent_s:.0f} s, the last trouble was {self.last_trouble}; "
                "what was answered is kept: run the same again when they are back"
            )

    @asynccontextmanager
    async def _slot(self) -> AsyncIterator[Server]:
        """The server with the fewest requests in flight, once one has a free slot."""
        server = await self._take()
        try:
            yield server
        finally:
            server.limit.give()
            async with self._turn:
                self._turn.notify(max(1, sum(max(0, s.limit.free) for s in self._servers)))

    async def _take(self) -> Server:
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
