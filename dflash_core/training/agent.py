"""torchrun, but it ends with the process that started it, however that ends: no orphan keeps a GPU."""

import ctypes
import os
import signal

PR_SET_PDEATHSIG = 1
ORPHANED = 130


def die_with_parent() -> None:
    """Let the kernel kill this process when the one that started it ends (Linux)."""
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(ORPHANED)


if __name__ == "__main__":
    die_with_parent()
    from torch.distributed.run import main

    main()
