"""Sees on a CPU what a GPU would be waited for: values, sizes and numbers that travel between host and device."""

from contextlib import ExitStack
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

ATEN = torch.ops.aten
READS = {ATEN._local_scalar_dense.default, ATEN.is_nonzero.default, ATEN.equal.default}
"""They read a value back."""
SIZED_BY_DATA = {
    ATEN.nonzero.default,
    ATEN.masked_select.default,
    ATEN._unique2.default,
    ATEN.unique_consecutive.default,
    ATEN.repeat_interleave.Tensor,
    ATEN.bincount.default,
}
INDEXED = {ATEN.index.Tensor, ATEN.index_put.default, ATEN.index_put_.default}
TO_HOST = {torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.cpu}
FROM_HOST = {torch.tensor, torch.as_tensor, torch.from_numpy}


class Waits:
    """Names in `seen` what would make the host wait, backward included."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.paused = False
        self._modes = ExitStack()

    def __enter__(self) -> "Waits":
        self._modes.enter_context(_Operators(self))
        self._modes.enter_context(_Calls(self))
        return self

    def __exit__(self, *failure: object) -> None:
        self._modes.close()

    def see(self, what: object) -> None:
        """Note it."""
        if not self.paused:
            self.seen.append(str(what))


class _Operators(TorchDispatchMode):
    def __init__(self, waits: Waits) -> None:
        super().__init__()
        self._waits = waits

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        by_mask = func in INDEXED and any(t is not None and t.dtype in (torch.bool, torch.uint8) for t in args[1])
        if by_mask or func in READS or func in SIZED_BY_DATA:
            self._waits.see(func)
        return func(*args, **(kwargs or {}))


class _Calls(TorchFunctionMode):
    """What no operator shows: on CUDA a number that is put through index tensors is copied there, and waited for."""

    def __init__(self, waits: Waits) -> None:
        super().__init__()
        self._waits = waits

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in TO_HOST or func in FROM_HOST or _copy_to_host(func, args, kwargs) or _number_put(func, args):
            self._waits.see(func)
        return func(*args, **kwargs)


def _copy_to_host(func: Any, args: Any, kwargs: Any) -> bool:
    """`to("cpu")` in so many letters: the device of another tensor is here the CPU, too."""
    named = [a for a in (*args[1:2], kwargs.get("device")) if isinstance(a, str)]
    return func is torch.Tensor.to and "cpu" in named and not kwargs.get("non_blocking", False)


def _number_put(func: Any, args: Any) -> bool:
    if func is not torch.Tensor.__setitem__ or isinstance(args[2], torch.Tensor):
        return False
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    return any(isinstance(part, torch.Tensor) for part in index)
