"""The caller's side of the worker processes: who holds which file, and what becomes of it when a worker dies.

The file a worker was at when it died, or on which it made no progress for `STALL_S`, fails with a sentence; files that
waited there, or for their upload, go to another worker as long as there is one. Nothing waits forever.
"""

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait

from dflash_core import errors
from dflash_core.errors import StorageError, UserError
from dflash_core.recipe import Recipe
from dflash_core.records import SourceFile
from dflash_core.tokenization.engine import FileFailed
from dflash_core.tokenization.objects import FileDone
from dflash_core.tokenization.worker import Message

log = logging.getLogger(__name__)

STALL_S = 300.0
SPARE_WORKERS = 8
"""Workers that may die before the rest of the files is given up."""
QUEUED_AHEAD = 2
"""Files a worker holds beyond those it can download at once."""


@dataclass
class Worker:
    """One worker process and the files it holds."""

    connection: Connection
    pid: int | None = None
    held: dict[str, SourceFile] = field(default_factory=dict)
    computing: str | None = None
    """The partition whose rows it is at."""
    heard: float = field(default_factory=time.monotonic)


class WorkerPool:
    """Processes that tokenize with one recipe; `run` drives them, leaving the context ends them."""

    def __init__(self, recipe: Recipe, processes: int) -> None:
        self._ahead = max(1, recipe.storage.downloads // processes) + QUEUED_AHEAD
        pairs = [socket.socketpair() for _ in range(1 + processes + SPARE_WORKERS)]
        ours, theirs = [a for a, _ in pairs], [b for _, b in pairs]
        code = "import sys; sys.path[:] = {!r}; from dflash_core.tokenization.worker import main; main()"
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                code.format(sys.path),
                recipe.model_dump_json(),
                json.dumps([processes, *(s.fileno() for s in theirs)]),
            ],
            pass_fds=[s.fileno() for s in theirs],
            stdin=subprocess.DEVNULL,
        )
        for side in theirs:
            side.close()
        self._control, *self._spare = [Connection(side.detach()) for side in ours]
        self._next_slot = 0
        self._workers: list[Worker] = []
        self._wanted = processes
        self._last_end = ""
        """What became of the worker that ended last."""

    def __enter__(self) -> "WorkerPool":
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            _kill(worker.pid)
        for connection in (self._control, *self._spare, *(w.connection for w in self._workers)):
            connection.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def run(self, sources: Sequence[SourceFile]) -> Iterator[FileDone | FileFailed]:
        """Every file's outcome, as soon as it is known.

        Raises:
            UserError: the tokenizer cannot be used at all.
        """
        waiting = deque(sources)
        self._await_nursery()
        for _ in range(self._wanted):
            self._start_worker()
        while waiting or any(worker.held for worker in self._workers):
            self._give(waiting)
            if not self._workers:
                why = f"no worker process is left to tokenize it, the last one {self._last_end}; run it again"
                yield from (FileFailed(source, f"{source.uri}: {why}") for source in waiting)
                return
            yield from self._listen(waiting)

    def _give(self, waiting: deque[SourceFile]) -> None:
        while waiting and self._workers:
            worker = min(self._workers, key=lambda w: len(w.held))
            if len(worker.held) >= self._ahead:
                return
            source = waiting.popleft()
            worker.held[source.partition] = source
            with suppress(BrokenPipeError):  # it is dead, which `_listen` is about to notice
                worker.connection.send(source)

    def _listen(self, waiting: deque[SourceFile]) -> Iterator[FileDone | FileFailed]:
        by_connection = {worker.connection: worker for worker in self._workers}
        for ready in wait([*by_connection], timeout=1.0):
            worker = by_connection[ready]  # type: ignore[index]
            try:
                message: Message = worker.connection.recv()
            except (EOFError, ConnectionResetError):
                yield from self._bury(worker, waiting, "was killed (out of memory?)")
                continue
            worker.heard = time.monotonic()
            if message.kind == "result":
                worker.held.pop(str(message.subject))
                yield message.value  # type: ignore[misc]
            elif message.kind == "crashed":
                yield from self._bury(worker, waiting, f"failed: {message.value}")
            elif message.kind == "refused":
                self._next_slot = len(self._spare)  # whoever followed would be refused, too
                yield from self._bury(worker, waiting, f"could not begin ({message.value})")
            else:
                self._note(worker, message)
        for worker in list(self._workers):
            at_work = worker.computing is not None or worker.pid is None
            if at_work and time.monotonic() - worker.heard > STALL_S:
                yield from self._bury(worker, waiting, f"made no progress for {STALL_S:.0f} s")

    def _note(self, worker: Worker, message: Message) -> None:
        if message.kind == "ready":
            worker.pid = int(message.subject)
        elif message.kind == "began":
            worker.computing = str(message.subject)
        elif message.kind == "computed":
            worker.computing = None
        elif message.kind == "log":
            log.log(int(message.subject), "%s", message.value)

    def _bury(self, worker: Worker, waiting: deque[SourceFile], reason: str) -> Iterator[FileFailed]:
        _kill(worker.pid)
        worker.connection.close()
        self._workers.remove(worker)
        self._last_end = reason
        self._start_worker()
        for partition, source in worker.held.items():
            if partition == worker.computing:
                yield FileFailed(source, f"{source.uri}: its worker process {reason}; run it again")
            else:
                waiting.appendleft(source)

    def _start_worker(self) -> None:
        if self._next_slot >= len(self._spare):
            return
        worker = Worker(self._spare[self._next_slot])
        with suppress(BrokenPipeError):
            self._control.send(self._next_slot)
            self._workers.append(worker)
        self._next_slot += 1

    def _await_nursery(self) -> None:
        while True:
            try:
                message: Message = self._control.recv()
            except (EOFError, ConnectionResetError):
                raise StorageError(
                    "the process that loads the tokenizer ended at once (out of memory?); see its output above"
                ) from None
            if message.kind == "log":
                log.log(int(message.subject), "%s", message.value)
            elif message.kind == "refused":
                kind = getattr(errors, str(message.subject), UserError)
                raise kind(message.value)
            else:
                return


def _kill(pid: int | None) -> None:
    if pid is not None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
