"""A server that never outlives the process that started it, SIGKILL included.

The server's parent shell leaves a watcher behind that waits on a pipe held open by us; when we end, however we end, the
pipe closes and the watcher stops the server: first as asked, after a grace period with its whole process group.
"""

import os
import random
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO

WATCHER = (
    'exec 3<&0; { read -r _ <&3; kill -s "$1" $$; sleep "$2"; kill -9 -$$; } >/dev/null 2>&1 & '
    'shift 2; exec "$@" </dev/null 3<&-'
)

PORTS = range(20_000, 32_768)


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 that are free now; all are held until the last is found, so that they differ.

    Drawn from below those that the kernel gives to outgoing connections: on a busy machine one of these would take a
    port between here and the server's bind.

    Raises:
        OSError: there are not so many.
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
    raise OSError(f"no {count} free ports from {PORTS.start} to {PORTS.stop - 1} on 127.0.0.1")


@contextmanager
def supervised(
    command: Sequence[str],
    stop_signal: str,
    grace_s: float,
    log: Path | None = None,
    environment: Mapping[str, str] | None = None,
    holds: IO[str] | None = None,
) -> Iterator["subprocess.Popen[bytes]"]:
    """Run a server while the context lasts, in a session of its own.

    Args:
        command: program and arguments.
        stop_signal: what ends it in good order, for example "TERM".
        grace_s: seconds until its whole process group is killed.
        log: where its output goes; None: to ours.
        environment: added to ours.
        holds: a locked file that the server keeps open, so that the lock lasts as long as the server.
    """
    # A shell that started us in the background made us ignore SIGINT; the server would inherit that.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    output = None if log is None else log.open("wb")
    try:
        process = subprocess.Popen(
            ["/bin/sh", "-c", WATCHER, "supervised", stop_signal, str(grace_s), *command],
            env={**os.environ, **(environment or {})},
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            start_new_session=True,
            pass_fds=() if holds is None else (holds.fileno(),),
        )
        assert process.stdin is not None
        try:
            yield process
        finally:
            process.stdin.close()
            process.wait()
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    finally:
        if output is not None:
            output.close()


def last_words(log: Path, lines: int = 3) -> str:
    """The end of a log, on one line, for an error message."""
    return " | ".join(log.read_text(encoding="utf8", errors="replace").strip().splitlines()[-lines:])
