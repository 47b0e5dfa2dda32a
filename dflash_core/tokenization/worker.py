"""The processes that tokenize: a nursery that loads the tokenizer once, forks one worker a core and forgets it.

A fresh interpreter rather than a fork of the caller, whose threads would make forking unsafe; a fork of the nursery
rather than a fresh interpreter per worker, since loading a tokenizer costs seconds of CPU and 300 MB. Workers talk to
the caller over one socket each; whoever loses its other side ends.
"""

import ctypes
import gc
import json
import logging
import os
import signal
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection
from typing import Literal, NamedTuple

from dflash_core.errors import RecipeError, UserError
from dflash_core.recipe import Recipe
from dflash_core.records import SourceFile
from dflash_core.storage.store import Download, open_stores
from dflash_core.tokenization.engine import Engine, FileFailed
from dflash_core.tokenization.files import FileTokenizer
from dflash_core.tokenization.objects import FileDone, Names, TokenizedFile, store_file

HEARTBEAT_S = 5.0
M_ARENA_MAX = -8

Kind = Literal["ready", "began", "progress", "computed", "log", "result", "refused", "crashed"]


class Message(NamedTuple):
    """What a worker or the nursery says; `subject` is a partition, a process id, a level or a sentence."""

    kind: Kind
    subject: str | int = ""
    value: "FileDone | FileFailed | str | None" = None


class TokenizingEngine(Engine[tuple[TokenizedFile, str, float], FileDone]):
    """The engine that makes shards."""

    def __init__(self, tokenizer: FileTokenizer, recipe: Recipe, processes: int, voice: "Voice | None" = None) -> None:
        self._tokenizer, self._voice = tokenizer, voice
        self._stores_of_process = open_stores(recipe)
        storage = recipe.storage
        downloads, uploads = max(1, storage.downloads // processes), max(1, storage.uploads // processes)
        super().__init__(self._stores_of_process, self._tokenize, self._store, downloads, uploads)

    def _tokenize(self, source: SourceFile, body: Download) -> tuple[TokenizedFile, str, float]:
        began = time.monotonic()
        if self._voice is None:
            return self._tokenizer.tokenize(body.body, source, body.sha256), body.sha256, began
        self._voice.say("began", source.partition)
        try:
            return self._tokenizer.tokenize(body.body, source, body.sha256), body.sha256, began
        finally:
            self._voice.say("computed", source.partition)

    def _store(self, source: SourceFile, done: tuple[TokenizedFile, str, float]) -> FileDone:
        tokenized, sha256, began = done
        names = Names(self._tokenizer.fingerprint, source.partition)
        manifest = store_file(self._stores_of_process, names, source, sha256, tokenized)
        return FileDone(source, manifest, tokenized.statistics, skipped=False, seconds=time.monotonic() - began)


def main() -> None:
    """The nursery. Arguments: the recipe as JSON, the control socket, then one socket for each possible worker."""
    recipe = Recipe.model_validate_json(sys.argv[1])
    processes, control_fd, *worker_fds = json.loads(sys.argv[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is the caller's, who then ends us
    control = Connection(control_fd)
    voice = Voice(control)
    _forward_log(voice)
    try:
        loaded = FileTokenizer(recipe)
    except UserError as error:
        voice.say("refused", type(error).__name__, str(error))
        return
    voice.say("ready", os.getpid())
    _trim()
    given: FileTokenizer | str = loaded
    fingerprint, forked = loaded.fingerprint, 0
    del loaded
    while True:
        try:
            slot = control.recv() if control.poll(1.0) else None
        except (EOFError, ConnectionResetError):
            return
        if slot is not None:
            _fork(slot, worker_fds, control, given, recipe, processes)
            forked += 1
            if forked == processes:  # whoever has to follow one that died loads it again
                given = fingerprint
                _trim()
        _reap()


def _trim() -> None:
    """Give back what loading needed, 180 MB of 440, so that no worker inherits it; glibc only, elsewhere it stays."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.mallopt(M_ARENA_MAX, 2)  # instead of one for each of a worker's 32 threads
        libc.malloc_trim(0)


def _fork(
    slot: int,
    worker_fds: list[int],
    control: Connection,
    given: FileTokenizer | str,
    recipe: Recipe,
    processes: int,
) -> None:
    nursery = os.getpid()
    if os.fork() == 0:
        control.close()
        for fd in worker_fds:
            if fd not in (worker_fds[slot], -1):
                os.close(fd)
        status = 1
        try:
            status = _work(Connection(worker_fds[slot]), given, recipe, processes, nursery)
        finally:
            os._exit(status)
    os.close(worker_fds[slot])
    worker_fds[slot] = -1


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


class Voice:
    """One socket that several threads speak through."""

    def __init__(self, socket: Connection) -> None:
        self._socket, self._lock = socket, threading.Lock()
        self._last = time.monotonic()

    def say(self, kind: Kind, subject: str | int = "", value: "FileDone | FileFailed | str | None" = None) -> None:
        """Send a message; raises OSError when nobody listens any more."""
        with self._lock:
            self._last = time.monotonic()
            self._socket.send(Message(kind, subject, value))

    def progress(self) -> None:
        """A sign of life, now and then."""
        if time.monotonic() - self._last > HEARTBEAT_S:
            self.say("progress")


def _work(socket: Connection, given: FileTokenizer | str, recipe: Recipe, processes: int, nursery: int) -> int:
    """Serve the socket with the given tokenizer, or with one loaded anew that has to have the given fingerprint."""
    threading.Thread(target=_end_with, args=(nursery,), daemon=True).start()
    voice = Voice(socket)
    _forward_log(voice)
    try:
        tokenizer = _load_again(recipe, given) if isinstance(given, str) else given
        tokenizer.on_progress = voice.progress
        voice.say("ready", os.getpid())
        engine = TokenizingEngine(tokenizer, recipe, processes, voice)
        while True:
            while socket.poll(0) or not engine.outstanding:
                engine.add(socket.recv())
            for result in engine.step():
                voice.say("result", result.source.partition, result)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return 0  # nobody is left to work for
    except UserError as error:
        voice.say("refused", type(error).__name__, str(error))
        return 1
    except Exception:  # noqa: BLE001 - the border of the process: whatever it was, the caller is told
        voice.say("crashed", os.getpid(), traceback.format_exc(limit=-3))
        return 1


def _load_again(recipe: Recipe, fingerprint: str) -> FileTokenizer:
    tokenizer = FileTokenizer(recipe)
    if tokenizer.fingerprint != fingerprint:
        raise RecipeError(f"the tokenizer in {recipe.tokenizer_path} was changed while it was in use")
    return tokenizer


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def _forward_log(voice: Voice) -> None:
    logger = logging.getLogger("dflash_core")
    logger.handlers[:] = [_Forward(voice)]
    logger.setLevel(logging.INFO)


class _Forward(logging.Handler):
    """Log lines go to the caller, who knows where people look."""

    def __init__(self, voice: Voice) -> None:
        super().__init__()
        self._voice = voice

    def emit(self, record: logging.LogRecord) -> None:
        self._voice.say("log", record.levelno, record.getMessage())


if __name__ == "__main__":
    main()
