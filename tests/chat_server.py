"""A chat completions server that misbehaves on request: tests run it in a thread, the benchmark as a program.

The answer is a function of the prompt's text, and so is the mischief: `[once:X]` in it spoils the first answer to this
text, `[always:X]` every one, with X one of 429, 500, 503, 400, 302, 401, reset, half, text, list, stall, nochoice;
`[say:X]` makes the answer itself special: length, thought, empty, loop, filter, call, slow. Its "tokens" are
characters.
"""

import argparse
import asyncio
import hashlib
import json
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from typing import Literal

STALL_S = 60.0
JSON = "application/json"


@dataclass
class Behaviour:
    """How the server is set up."""

    model: str = "tiny"
    delay_s: float = 0.0
    slots: int = 1 << 30
    """More requests at once are answered with 429."""
    token_ids: bool | Literal["probe"] = False
    """Otherwise `return_token_ids` is an unexpected field, 422; "probe": of all requests but the probes."""
    count_tokens: Callable[[str], int] = len
    extra_tokens: int = 0
    """More tokens a prompt than it has: another chat template."""
    room: int | None = None
    """The context length that it tells."""
    key: str | None = None
    """The key it wants; others are told about in full."""
    reasoning_field: str = "reasoning_content"


@dataclass
class Seen:
    """What the server saw."""

    requests: Counter[str] = field(default_factory=Counter)
    """By the prompt's text."""
    answers: int = 0
    busy: int = 0
    """Requests that met no free slot."""
    in_flight: int = 0
    most: int = 0
    slot_seconds: float = 0.0
    since: float = field(default_factory=time.monotonic)
    first: float = 0.0
    """When the first real request came, and when the last one was answered; not the probes."""
    last: float = 0.0
    bodies: list[dict[str, object]] = field(default_factory=list)
    headers: list[str] = field(default_factory=list)

    def move(self, change: int) -> None:
        """A request comes or goes."""
        now = time.monotonic()
        self.slot_seconds += self.in_flight * (now - self.since)
        self.since = now
        self.in_flight += change
        self.most = max(self.most, self.in_flight)


class ChatServer:
    """One server on loopback; `url` is its base URL."""

    def __init__(self, behaviour: Behaviour, *, remember: bool = True) -> None:
        self.behaviour, self.seen = behaviour, Seen()
        self.url = ""
        self._remember = remember

    async def serve(self, started: threading.Event, port: int = 0) -> None:
        """Until cancelled."""
        server = await asyncio.start_server(self._talk, "127.0.0.1", port, backlog=1024)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
        started.set()
        async with server:
            await server.serve_forever()

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            while head := await reader.readuntil(b"\r\n\r\n"):
                text = head.decode()
                length = re.search(r"(?i)content-length: (\d+)", text)
                body = await reader.readexactly(int(length.group(1))) if length else b""
                await self._answer(text, body, writer)
        with suppress(ConnectionError):
            writer.close()

    async def _answer(self, head: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        wanted, path = self.behaviour.key, head.split(" ")[1]
        if self._remember:
            self.seen.headers.append(head)
        if wanted is not None and f"Bearer {wanted}" not in head:
            await _send(writer, 401, {"error": {"message": f"wrong key, you sent {head}"}})
        elif path.endswith("/models"):
            entry = {"id": self.behaviour.model, "max_model_len": self.behaviour.room}
            await _send(writer, 200, {"data": [entry]})
        elif path.endswith("/seen"):
            self.seen.move(0)
            await _send(
                writer, 200, {k: v for k, v in asdict(self.seen).items() if k not in ("bodies", "headers", "requests")}
            )
        else:
            self.seen.move(+1)
            try:
                await self._complete(json.loads(body), writer)
            finally:
                self.seen.move(-1)

    async def _complete(self, body: dict[str, object], writer: asyncio.StreamWriter) -> None:
        knows = self.behaviour.token_ids is True or (self.behaviour.token_ids == "probe" and body["max_tokens"] == 1)
        if "return_token_ids" in body and not knows:
            return await _send(writer, 422, {"detail": "Unexpected fields in the request: {'return_token_ids'}"})
        if self.seen.in_flight > self.behaviour.slots:
            self.seen.busy += 1
            return await _send(writer, 429, {"error": {"message": "too many requests"}}, "retry-after: 0.05\r\n")
        messages: list[dict[str, str]] = body["messages"]  # type: ignore[assignment]
        text = messages[-1]["content"]
        if self._remember:
            self.seen.requests[text] += 1
        if body["max_tokens"] != 1:
            self.seen.first = self.seen.first or time.monotonic()
        if self._remember:
            self.seen.bodies.append(body)
        if "[refused]" in text:  # probes included
            return await _send(writer, 400, {"error": {"message": "not this prompt"}})
        mischief = re.search(r"\[(once|always):(\w+)\]", text)
        if body["max_tokens"] != 1 and mischief and (mischief.group(1) == "always" or self.seen.requests[text] == 1):
            return await self._misbehave(mischief.group(2), writer)
        pace = 0.5 if "[fast]" in text else 30.0 if "[say:slow]" in text and body["max_tokens"] != 1 else 1.0
        await asyncio.sleep(self.behaviour.delay_s * pace)
        self.seen.answers += 1
        self.seen.last = time.monotonic()
        return await _send(writer, 200, self._completion(text, body))

    def _completion(self, text: str, body: dict[str, object]) -> dict[str, object]:
        said = re.search(r"\[say:(\w+)\]", text)
        kind = said.group(1) if said else ""
        answer, finish = answer_to(text), "stop"
        thought: str | None = f"Thinking about {answer}"
        if kind == "length" and int(str(body["max_tokens"])) < 100:
            finish = "length"
        elif kind == "thought":
            answer, finish = "", "length"
        elif kind == "empty":
            answer, thought = "", None
        elif kind == "loop":
            answer = "and so on " * 100
        elif kind == "filter":
            finish = "content_filter"
        message: dict[str, object] = {"role": "assistant", "content": answer}
        message[self.behaviour.reasoning_field] = thought
        if kind == "call":
            function = {"name": "add", "arguments": '{"a": 1}'}
            message |= {"content": None, "tool_calls": [{"id": "c1", "type": "function", "function": function}]}
            finish = "tool_calls"
        choice: dict[str, object] = {"index": 0, "message": message, "finish_reason": finish}
        tokens = self.behaviour.count_tokens(text) + self.behaviour.extra_tokens
        result: dict[str, object] = {"model": self.behaviour.model, "choices": [choice]}
        result["usage"] = {"prompt_tokens": tokens, "completion_tokens": len(answer)}
        if body.get("return_token_ids"):
            result["prompt_token_ids"] = [ord(c) for c in text] + [0] * self.behaviour.extra_tokens
            choice["token_ids"] = [ord(c) for c in answer]
        return result

    async def _misbehave(self, kind: str, writer: asyncio.StreamWriter) -> None:
        whole = json.dumps({"choices": []}).encode()
        if kind.isdigit():
            await _send(
                writer, int(kind), {"error": {"message": f"mischief {kind}"}}, "location: http://elsewhere/v1\r\n"
            )
        elif kind == "reset":
            writer.transport.abort()
        elif kind == "half":
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 5000\r\n\r\n" + whole)
            await writer.drain()
            writer.close()
        elif kind == "text":
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\ncontent-length: 6\r\n\r\n<html>")
        elif kind == "stall":
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 5000\r\n\r\n{")
            await asyncio.sleep(STALL_S)
        else:
            await _send(writer, 200, {"list": [], "nochoice": {"choices": [{}]}}[kind])


def answer_to(text: str) -> str:
    """A few words that depend on the text."""
    digest = hashlib.sha256(text.encode()).hexdigest()
    return f"answer {digest[:8]} to {text[:40]}"


async def _send(writer: asyncio.StreamWriter, status: int, body: object, headers: str = "") -> None:
    content = json.dumps(body).encode()
    head = f"HTTP/1.1 {status} X\r\ncontent-type: {JSON}\r\n{headers}content-length: {len(content)}\r\n\r\n"
    writer.write(head.encode() + content)
    await writer.drain()


@contextmanager
def running(behaviour: Behaviour) -> Iterator[ChatServer]:
    """The server in a thread of its own."""
    server, started = ChatServer(behaviour), threading.Event()
    loop = asyncio.new_event_loop()
    task = loop.create_task(server.serve(started))
    thread = threading.Thread(target=_run, args=(loop, task))
    thread.start()
    assert started.wait(30)
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join()


def _run(loop: asyncio.AbstractEventLoop, task: "asyncio.Task[None]") -> None:
    with suppress(asyncio.CancelledError):
        loop.run_until_complete(task)
    for left in asyncio.all_tasks(loop):
        left.cancel()
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()


def main() -> None:
    """As a program: answers after --delay seconds until it is killed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--delay", type=float, default=2.0)
    parser.add_argument("--slots", type=int, default=1 << 30)
    arguments = parser.parse_args()
    server = ChatServer(Behaviour(delay_s=arguments.delay, slots=arguments.slots), remember=False)
    asyncio.run(server.serve(threading.Event(), arguments.port))


if __name__ == "__main__":
    main()
