"""Sums the gradient over the ranks, part by part, while backward is still making the rest.

The trade-off: parts are whole decoder layers, last layer first, as backward ends them, and every rank sends them in
that one order whatever its own timing; a finer cut would hide a little more of the time and cost more launches.
"""

from collections.abc import Callable

import torch
from torch import distributed, nn


class OverlappedSum:
    """One all-reduce for each decoder layer's gradient, and one for what lies around the layers."""

    def __init__(self, module: nn.Module, flat: torch.Tensor, group: distributed.ProcessGroup | None) -> None:
        """
        Args:
            module: its `layers` hold the parameters that come first in `flat`, layer by layer.
            flat: all gradients, in the order of `module.parameters()`; each parameter's `grad` is a view into it.
            group: the ranks; None: all there are.
        """
        self._group = group
        layers = list(module.get_submodule("layers").children())
        sizes = [sum(p.numel() for p in layer.parameters()) for layer in layers]
        parts = list(torch.split(flat, [*sizes, flat.numel() - sum(sizes)]))
        members = [list(layer.parameters()) for layer in layers]
        inside = {id(p) for part in members for p in part}
        members.append([p for p in module.parameters() if id(p) not in inside])
        order = [*reversed(range(len(layers))), len(layers)]
        self._parts = [parts[i] for i in order]
        self._members = [len(members[i]) for i in order]
        for position, i in enumerate(order):
            for parameter in members[i]:
                parameter.register_post_accumulate_grad_hook(self._hook(position))  # type: ignore[no-untyped-call]
        self._begin(armed=False)

    def arm(self) -> None:
        """The next backward is the last of this step: its gradients may leave as they are made."""
        self._begin(armed=True)

    def finish(self) -> None:
        """Send what has not left, wait for all; every rank calls it, also one that had no backward."""
        while self._sent < len(self._parts):
            self._send()
        for work in self._works:
            work.wait()
        self._begin(armed=False)

    def _begin(self, armed: bool) -> None:
        self._armed = armed
        self._left = list(self._members)
        self._sent = 0
        self._works: list[distributed.Work] = []

    def _hook(self, position: int) -> Callable[[torch.Tensor], None]:
        def made(_parameter: torch.Tensor) -> None:
            if not self._armed:
                return
            self._left[position] -= 1
            while self._sent < len(self._parts) and self._left[self._sent] == 0:
                self._send()

        return made

    def _send(self) -> None:
        work = distributed.all_reduce(self._parts[self._sent], group=self._group, async_op=True)
        assert work is not None
        self._works.append(work)
        self._sent += 1
