"""Every process we start: servers of others, and Python children of our own that answer.

All of them end with us, however we end, SIGKILL included: a shell that stays behind as *watcher* waits on a pipe that
only we hold open. When we end the pipe closes, and the watcher stops the process, first as asked, then with its whole
process group. A child of ours also ends as soon as nobody listens to it any more.

A child runs one function. What the function needs travels over a socket, never on the command line (which has a limit
and which everybody can read); so do its messages, its log lines, its answer and its refusal. Every second it *beats*: a
process that is stopped, or that no thread of it gets to run any more, is silent and can be told from one that works.

Where many children need the same large thing, a *nursery* makes it once and forks them: they share its memory, and are
there at once. It is a child itself, without threads but for the beat, so that forking is safe whatever threads we have.
"""

import ctypes
import gc
import logging
import os
import pickle
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import IO, Any, TypeVar

from dflash_core.errors import ProcessDied, UserError

log = logging.getLogger(__name__)
Answer = TypeVar("Answer")

# $1: the signal that asks; $2: seconds until the whole group is killed; then the command. `exec` keeps the process id,
# so the process we started is the program itself and the watcher is its child.
WATCHER = (
    'exec 3<&0; { read -r _ <&3; kill -s "$1" $$; sleep "$2"; kill -9 -$$; } >/dev/null 2>&1 & '
    'shift 2; exec "$@" </dev/null 3<&-'
)
ENTRY = "import sys; sys.path[:] = {path!r}; from dflash_core.processes import _run_child; _run_child({fd})"
PORTS = range(20_000, 32_768)
BEAT_S = 1.0
LOOK_S = 0.5
"""Silence is counted in looks of the parent, at most one in this time: a suspended machine makes nobody late."""
LAST_LINES = 15
M_ARENA_MAX = -8
"""Of glibc's mallopt."""
GRACE_S = 5.0


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 that are free now; all are held until the last is found, so that they differ.

    Drawn from below those that the kernel gives to outgoing connections: on a busy machine one of these would take a
    port between here and the server's bind.

    Raises:
        OSError: there are not that many.
    """
    with ExitStack() as stack:
        found: list[int] = []
        for port in random.SystemRandom().sample(PORTS, len(PORTS)):
            if len(found) == count:
                return found
            one = stack.enter_context(socket.socket())
            with suppress(OSError):
                one.bind(("127.0.0.1", port))
                found.append(port)
    raise OSError(f"fewer than {count} free ports from {PORTS.start} to {PORTS.stop - 1} on 127.0.0.1")


@contextmanager
def running_server(
    command: Sequence[str],
    stop_signal: str,
    grace_s: float,
    log: Path | None = None,
    environment: Mapping[str, str | None] | None = None,
    inherited: Sequence[int] = (),
) -> Iterator["subprocess.Popen[bytes]"]:
    """Run a program of others while the context lasts, in a session of its own.

    Args:
        command: program and arguments.
        stop_signal: what ends it in good order, for example "TERM".
        grace_s: seconds until its whole process group is killed.
        log: where its output goes; None: to ours.
        environment: added to ours; a variable that is None is not passed on.
        inherited: descriptors that it keeps open; a lock among them lasts as long as the program.
    """
    # A shell that started us in the background made us ignore SIGINT; the server would inherit that.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    with ExitStack() as stack:
        output = None if log is None else stack.enter_context(log.open("wb"))
        process = _start(command, stop_signal, grace_s, output, environment, inherited)
        try:
            yield process
        finally:
            _end(process)


def last_words(log: Path, lines: int = 3) -> str:
    """The end of a log, on one line, for an error message."""
    return " | ".join(log.read_text(encoding="utf8", errors="replace").strip().splitlines()[-lines:])


@dataclass(frozen=True)
class Told:
    """A message of the child's function."""

    value: Any


@dataclass(frozen=True)
class Answered:
    """The function returned this; the child has nothing more to say."""

    value: Any


@dataclass(frozen=True)
class Refused:
    """The function raised a UserError; the child has nothing more to say."""

    error: UserError


@dataclass(frozen=True)
class Died:
    """The child ended without an answer: killed, or by an exception that is not a UserError."""

    reason: str
    """How, with its last lines where they were kept."""


News = Told | Answered | Refused | Died


@dataclass(frozen=True)
class _Beat:
    """The child's process runs."""


@dataclass(frozen=True)
class _Logged:
    """A line for our log, which goes where people look."""

    level: int
    text: str


@dataclass(frozen=True)
class _Crashed:
    """An exception that is not a UserError; its traceback is in the output."""

    text: str


@dataclass(frozen=True)
class _Born:
    """The first word of a forked child: its process id."""

    pid: int


@dataclass(frozen=True)
class _Buried:
    """A nursery has reaped one of its children."""

    pid: int
    code: int
    """Exit code, or minus the signal."""


@dataclass(eq=False)
class Child:
    """A Python process of ours at work on one function."""

    name: str
    process: "subprocess.Popen[bytes] | _Forked"
    connection: Connection
    exit: int | None = None
    """A descriptor that is ready once the process has ended, where the system has such; else it is asked every look."""
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=LAST_LINES))
    ended: bool = False
    """Its last news has been handed out."""
    silent_looks: int = 0
    _looked_at: float = field(default_factory=time.monotonic)
    _crash: str = ""
    _reader: threading.Thread | None = None
    _waiting: deque[News] = field(default_factory=deque)
    """Read already, but not listened to yet."""
    _buried: dict[int, int] = field(default_factory=dict)
    """Of a nursery: how its children ended, by process id."""

    @property
    def silent_s(self) -> float:
        """For how long nothing has been heard of it, in looks."""
        return self.silent_looks * LOOK_S

    def tell(self, message: object) -> None:
        """Send the function something; one that is dead already does not get it, which `listen` is about to say."""
        with suppress(BrokenPipeError, ConnectionResetError):
            self.connection.send(message)

    def ask_to_stop(self) -> None:
        """SIGINT, as a Ctrl-C at a terminal would be; the function decides what it saves first."""
        with suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGINT)

    def end(self) -> None:
        """Kill it with everything it started; harmless once it has ended."""
        if isinstance(self.process, _Forked):
            self.process.end()
        else:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            _end(self.process)
        self.connection.close()
        if self.exit is not None:
            os.close(self.exit)
            self.exit = None
        self.ended = True

    def _read(self) -> News | None:
        """Take one message from the connection.

        The end of the connection alone would not do: the watcher has inherited the other side and holds it open.
        """
        gone = self.process.poll() is not None  # asked first: whatever it said is in the connection then
        try:
            if not self.connection.poll(0):
                return Died(self._how_it_ended()) if gone else None
            message: News | _Logged | _Crashed | _Born | _Buried | _Beat = self.connection.recv()
        except (EOFError, OSError, pickle.UnpicklingError):
            return Died(self._how_it_ended())
        self.silent_looks, self._looked_at = 0, time.monotonic()
        if isinstance(message, _Logged):
            log.log(message.level, "%s", message.text)
            if self._reader is not None:
                self.last_lines.append(f"{message.text}\n")
            return None
        if isinstance(message, _Crashed):
            self._crash = message.text
        elif isinstance(message, _Buried):
            self._buried[message.pid] = message.code
        elif isinstance(message, _Born):
            assert isinstance(self.process, _Forked)
            self.process.pid = message.pid
        elif not isinstance(message, _Beat):
            return message
        return None

    def _how_it_ended(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(GRACE_S)
        if self._reader is not None:
            self._reader.join(GRACE_S)
        code = self.process.poll()
        if isinstance(self.process, _Forked) and self.process.pid is None:
            how = "was not forked, because the process that forks ended"
        elif self._crash:
            how = f"failed: {self._crash}"
        elif code is None:
            how = "closed its connection"
        elif code < 0:
            how = f"was killed by {signal.Signals(-code).name}" + (
                " (out of memory?)" if code == -signal.SIGKILL else ""
            )
        else:
            how = f"ended with exit code {code}"
        return how + (f"; its last lines:\n{''.join(self.last_lines)}" if self.last_lines else "")


def start(
    function: Callable[..., object],
    *arguments: object,
    name: str,
    environment: Mapping[str, str] | None = None,
    keep_output: bool = False,
) -> Child:
    """Run `function(parent, *arguments)` in a child process; `parent` is a `Parent`.

    Args:
        function: of a module, so that the child can import it.
        arguments: anything that can be pickled.
        name: for people.
        environment: added to ours.
        keep_output: pass its output on through our stderr and keep its last lines for `Died`; else it shares ours.
    """
    ours, theirs = socket.socketpair()
    fd = theirs.fileno()
    command = [sys.executable, "-c", ENTRY.format(path=sys.path, fd=fd)]
    output = subprocess.PIPE if keep_output else None
    process = _start(command, "KILL", 0, output, environment, (fd,))
    theirs.close()
    child = Child(name, process, Connection(ours.detach()), _exit_of(process.pid))
    if keep_output:
        child._reader = threading.Thread(target=_pass_on, args=(process.stdout, child.last_lines), daemon=True)
        child._reader.start()
    child.tell((function, arguments))
    return child


@dataclass(eq=False)
class _Forked:
    """The process of a forked child: what is known of it comes from itself and from its nursery."""

    nursery: Child
    pid: int | None = None

    def poll(self) -> int | None:
        """How it ended, or its nursery before it was forked; None: it runs, or nobody can say."""
        source = self.nursery
        while not source.ended and not source._waiting and source.connection.poll(0):
            news = source._read()
            if news is not None:
                source._waiting.append(news)
        return source.process.poll() if self.pid is None else source._buried.get(self.pid)

    def wait(self, timeout_s: float) -> None:
        """Until it is known how it ended, or the time is up."""
        deadline = time.monotonic() + timeout_s
        while self.pid is not None and self.poll() is None and time.monotonic() < deadline:
            if self.nursery.ended or self.nursery._waiting:
                return  # nobody is left to say it
            time.sleep(0.01)

    def send_signal(self, number: int) -> None:
        if self.pid is not None and self.poll() is None:
            os.kill(self.pid, number)

    def end(self) -> None:
        """Kill it; where its nursery has died, that one's process group goes as a whole when it is ended."""
        if not self.nursery.ended:
            with suppress(ProcessLookupError):
                self.send_signal(signal.SIGKILL)
            self.wait(GRACE_S)


class Nursery:
    """A child that makes something once, and then forks children that have it."""

    def __init__(self, prepare: Callable[..., object], *arguments: object, name: str, keep_for: int) -> None:
        """
        Args:
            prepare: called in the nursery with the arguments; its exceptions are the nursery's news.
            arguments: anything that can be pickled.
            name: for people.
            keep_for: after so many forks the nursery forgets what it made, which would only take memory from then on;
                a child that is forked later makes it for itself.
        """
        self.child = start(_tend, prepare, arguments, keep_for, name=name)
        self._forks: list[Child] = []

    def fork(self, function: Callable[..., object], *arguments: object, name: str) -> Child:
        """Run `function(parent, prepared, *arguments)` in a forked child, as soon as the nursery is ready."""
        ours, theirs = socket.socketpair()
        told = socket.fromfd(self.child.connection.fileno(), socket.AF_UNIX, socket.SOCK_STREAM)
        with suppress(BrokenPipeError, ConnectionResetError), told as control:
            socket.send_fds(control, [b"f"], [theirs.fileno()])
        theirs.close()
        child = Child(name, _Forked(self.child), Connection(ours.detach()))
        child.tell((function, arguments))
        self._forks.append(child)
        return child

    def end(self) -> None:
        """Kill it and every child that it has forked."""
        self.child.end()
        for child in self._forks:
            child.end()


def listen(children: Iterable[Child], timeout_s: float = LOOK_S) -> Iterator[tuple[Child, News]]:
    """What the children have to say within the timeout, maybe nothing; counts a look at those that say nothing.

    After `Answered`, `Refused` or `Died` a child has ended and is not listened to again.
    """
    open_ones = [child for child in children if not child.ended]
    if any(child._waiting for child in open_ones):
        timeout_s = 0.0
    sources: dict[object, Child] = {child.connection: child for child in open_ones}
    sources |= {child.exit: child for child in open_ones if child.exit is not None}
    ready = [sources[source] for source in wait([*sources], timeout_s)]  # type: ignore[list-item]
    others = (child for child in open_ones if child._waiting or child.process.poll() is not None)
    for child in dict.fromkeys([*ready, *others]):
        news = child._waiting.popleft() if child._waiting else child._read()
        if isinstance(news, (Answered, Refused, Died)):
            child.ended = True
        if news is not None:
            yield child, news
    now = time.monotonic()
    for child in open_ones:
        if now - child._looked_at >= LOOK_S:
            child._looked_at = now
            child.silent_looks += 1


def run(
    function: Callable[..., Any],
    *arguments: object,
    name: str,
    on_told: Callable[[Any], None] = lambda value: None,
    stop_timeout_s: float = GRACE_S,
    environment: Mapping[str, str] | None = None,
) -> Any:
    """Run a function in a child process and return its answer; its output passes through ours.

    When we are interrupted the child gets SIGINT and `stop_timeout_s` to save what it has to save.

    Raises:
        UserError: the function's own.
        ProcessDied: the child ended without an answer; its last lines are in the message.
    """
    child = start(function, *arguments, name=name, environment=environment, keep_output=True)
    try:
        return _answer_of(child, on_told)
    except BaseException:
        wind_down([child], on_told, stop_timeout_s)
        raise
    finally:
        child.end()


def wind_down(children: Sequence[Child], on_told: Callable[[Any], None], timeout_s: float) -> None:
    """Ask the children to stop, and listen until all have ended or the time is up."""
    for child in children:
        if not child.ended:
            child.ask_to_stop()
    deadline = time.monotonic() + timeout_s
    while not all(child.ended for child in children) and time.monotonic() < deadline:
        for _, news in listen(children):
            if isinstance(news, Told):
                on_told(news.value)


def _answer_of(child: Child, on_told: Callable[[Any], None]) -> Any:
    while True:
        for _, news in listen([child]):
            if isinstance(news, Answered):
                return news.value
            if isinstance(news, Refused):
                raise news.error
            if isinstance(news, Died):
                raise ProcessDied(f"the process for {child.name} {news.reason}")
            on_told(news.value)


class Parent:
    """The other side, for a function that runs in a child. Several threads may speak."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._speaking = connection, threading.Lock()

    def tell(self, message: object) -> None:
        """Say something to whoever started us; ends this process if nobody listens any more."""
        self._say(Told(message))

    def heard(self, wait_s: float | None = 0.0) -> bool:
        """Whether something waits to be taken; `wait_s` None: wait until it does."""
        return self._connection.poll(wait_s)

    def take(self) -> Any:
        """What was told to us next."""
        try:
            return self._connection.recv()
        except (EOFError, ConnectionResetError):
            os._exit(0)

    def _say(self, message: object) -> None:
        try:
            with self._speaking:
                self._connection.send(message)
        except (BrokenPipeError, ConnectionResetError):
            os._exit(0)


class _ToParent(logging.Handler):
    def __init__(self, parent: Parent) -> None:
        super().__init__()
        self._parent = parent

    def emit(self, record: logging.LogRecord) -> None:
        self._parent._say(_Logged(record.levelno, record.getMessage()))


def _run_child(fd: int) -> None:
    """The main function of a child."""
    sys.exit(_serve(Connection(fd)))


def _serve(connection: Connection, make: Callable[[], Sequence[object]] = tuple) -> int:
    """Run the function that the parent tells us, with what `make` gives; returns the exit code."""
    parent = Parent(connection)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    ours = logging.getLogger("dflash_core")
    ours.handlers[:], ours.propagate = [_ToParent(parent)], False
    ours.setLevel(logging.INFO)
    threading.Thread(target=_beat, args=(parent,), name="beat", daemon=True).start()
    try:
        function, arguments = parent.take()
        parent._say(Answered(function(parent, *make(), *arguments)))
    except UserError as error:
        parent._say(Refused(error))
        return error.exit_code
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except Exception as error:  # noqa: BLE001  the border of the process: whatever it was, the parent is told
        place = traceback.extract_tb(error.__traceback__)[-1]
        parent._say(_Crashed(f"{type(error).__name__}: {error} ({Path(place.filename).name}:{place.lineno})"))
        traceback.print_exc()
        return 1
    return 0


def _tend(parent: Parent, prepare: Callable[..., object], arguments: tuple[object, ...], keep_for: int) -> None:
    """The function of a nursery: prepare, then fork a child for each descriptor that the parent sends."""
    kept: list[object] = [prepare(*arguments)]
    _give_back()
    forks = 0
    exits: set[int] = set()
    with socket.fromfd(parent._connection.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as control:
        while True:
            ready = set(wait([parent._connection, *exits], BEAT_S))
            if parent._connection in ready:
                word, descriptors, _, _ = socket.recv_fds(control, 1, 1)
                if not word:
                    os._exit(0)  # nobody is left to fork for
                pid = os.fork()
                if pid == 0:
                    _run_fork(parent, control, descriptors[0], lambda: kept or [prepare(*arguments)])
                os.close(descriptors[0])
                exits |= {fd for fd in (_exit_of(pid),) if fd is not None}
                forks += 1
                if forks == keep_for:
                    kept.clear()
                    _give_back()
            for fd in exits & ready:
                exits.remove(fd)
                os.close(fd)
            _bury(parent)


def _run_fork(nursery: Parent, control: socket.socket, fd: int, make: Callable[[], Sequence[object]]) -> None:
    """The main function of a forked child. Nothing of the nursery stays open in it, and it never returns."""
    code = 1
    try:
        nursery._connection.close()
        control.close()
        connection = Connection(fd)
        connection.send(_Born(os.getpid()))
        code = _serve(connection, make)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _exit_of(pid: int) -> int | None:
    """A descriptor that is ready once a process of ours has ended; None where the system has no such thing."""
    return os.pidfd_open(pid) if hasattr(os, "pidfd_open") else None


def _bury(parent: Parent) -> None:
    """Reap children that have ended, and tell how."""
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            parent._say(_Buried(ended[0], os.waitstatus_to_exitcode(ended[1])))


def _give_back() -> None:
    """Return to the system what preparing needed, so that no child inherits it; glibc only, elsewhere it stays."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()  # collections in the children would write to every object, and so copy the memory they share
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.mallopt(M_ARENA_MAX, 2)  # instead of one for each thread that transfers
        libc.malloc_trim(0)


def _beat(parent: Parent) -> None:
    while True:
        parent._say(_Beat())
        time.sleep(BEAT_S)


def _pass_on(output: IO[bytes], last: deque[str]) -> None:
    for line in output:
        text = line.decode(errors="replace")
        sys.stderr.write(text)
        last.append(text)


def _start(
    command: Sequence[str],
    stop_signal: str,
    grace_s: float,
    output: "int | IO[bytes] | None",
    environment: Mapping[str, str | None] | None,
    inherited: Sequence[int],
) -> "subprocess.Popen[bytes]":
    passed_on = {**os.environ, **(environment or {})}
    return subprocess.Popen(
        ["/bin/sh", "-c", WATCHER, "watcher", stop_signal, str(grace_s), *command],
        env={name: value for name, value in passed_on.items() if value is not None},
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=subprocess.STDOUT if output is not None else None,
        start_new_session=True,
        pass_fds=tuple(inherited),
    )


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Let the watcher end the program in good order, wait for it, and kill what is left of its group."""
    assert process.stdin is not None
    with suppress(BrokenPipeError):
        process.stdin.close()
    process.wait()
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
