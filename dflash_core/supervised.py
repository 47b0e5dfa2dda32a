"""A server that never outlives the process that started it, SIGKILL included.

The server's parent shell leaves a watcher behind that waits on a pipe held open by us; when we end, however we end, the
pipe closes and the watcher stops the server: first as asked, after a grace period with its whole process group.
"""

import os
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


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 that are free now; all are held until the last is found, so that they differ."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


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
