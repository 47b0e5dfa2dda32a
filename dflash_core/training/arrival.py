"""A tensor on its way from a device to the host, waited for with patience and not for ever.

A device that waits for another rank's part of a sum waits without end, and NCCL's own watchdog ends the process without
a word. The trade-off: the host asks every millisecond instead of sleeping in the driver, so that it can tell who waits.
"""

import time

import torch

POLL_S = 0.001


class StepOverdue(Exception):
    """The device does not come to the end of a step."""


class Arrival:
    """A copy that has been queued; make it right after the work whose end is waited for."""

    def __init__(self, tensor: torch.Tensor, patience_s: float | None) -> None:
        """`patience_s`: from `wait` on; None: as long as it takes, where nobody else is waited for."""
        self._patience_s = patience_s
        self._host = tensor.to("cpu", non_blocking=True)
        self._done = torch.cuda.current_stream(tensor.device).record_event() if tensor.is_cuda else None

    def wait(self) -> torch.Tensor:
        """The tensor in host memory.

        Raises:
            StepOverdue: it did not come in time.
        """
        if self._done is None:
            return self._host
        if self._patience_s is None:
            self._done.synchronize()
            return self._host
        began = time.monotonic()
        while not self._done.query():
            if time.monotonic() - began > self._patience_s:
                raise StepOverdue(
                    f"its device did not come to the end of a step within {self._patience_s:g} s: it waits for a rank "
                    "that hangs, or hangs itself; where steps take that long, raise training.placement.timeout_s"
                )
            time.sleep(POLL_S)
        return self._host
