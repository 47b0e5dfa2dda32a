"""torchrun, but it ends with the process that started it, however that ends: no orphan keeps a GPU."""

import ctypes
import logging
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
ORPHANED = 130


def die_with_parent() -> None:
    """Let the kernel kill this process when the one that started it ends (Linux)."""
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(ORPHANED)


def _run_quietly() -> int:
    """torchrun without its pages on each rank that fails, which tells why by itself unless a signal ends it."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main

    logging.disable(logging.ERROR)
    try:
        main()
    except ChildFailedError as error:
        for rank, failure in sorted(error.failures.items()):
            ended_by = -failure.exitcode
            if ended_by > 0 and ended_by != signal.SIGTERM:  # which torchrun itself sends to the others
                sys.stderr.write(f"rank {rank} was ended by {signal.Signals(ended_by).name}\n")
        return 1
    return 0


if __name__ == "__main__":
    die_with_parent()
    sys.exit(_run_quietly())
