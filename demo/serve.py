"""The demo's target behind `transformers serve`, the light OpenAI-compatible server."""

import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dflash_core.errors import UserError
from dflash_core.processes import free_ports, last_words, running_server

START_TIMEOUT_S = 120.0
GRACE_S = 3.0
OFFLINE = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
"""The model is so small that a second thread only waits for the first."""


@contextmanager
def serving(target: Path, log: Path) -> Iterator[str]:
    """The base URL of a server for this target, named as its path; it ends with the context, or with us.

    Raises:
        UserError: it does not come up; the sentence holds its last words.
    """
    port = free_ports(1)[0]
    command = [sys.executable, "-m", "transformers.cli.transformers", "serve", str(target)]
    command += ["--device", "cpu", "--dtype", "float32", "--host", "127.0.0.1", "--port", str(port)]
    with running_server(command, "TERM", GRACE_S, log, OFFLINE) as process:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not _answers(f"http://127.0.0.1:{port}/health"):
            if process.poll() is not None or time.monotonic() > deadline:
                raise UserError(f"transformers serve did not come up: {last_words(log)}")
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}/v1"


def _answers(url: str) -> bool:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=1):
            return True
    except OSError:
        return False
