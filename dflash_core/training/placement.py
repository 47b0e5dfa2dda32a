"""Which device runs what: the only module that knows how many devices there are.

One process (rank) per drafter; rank r owns drafter r and the targets r, r + R, r + 2R, ... of R drafters, used in turn.
The trade-off: a rank launches the work of all its devices from one thread, which works because nothing in the steady
step waits for a device.
"""

import shutil
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch
from torch import distributed

from dflash_core.errors import RecipeError, UserError
from dflash_core.recipe import PlacementSettings
from dflash_core.training.job import Rank

Shared = TypeVar("Shared")

SETUP_TIMEOUT = timedelta(hours=2)
"""Downloads, hashing and loading of a large target; and the lead's writing of checkpoints."""


@dataclass(frozen=True)
class RankPlacement:
    """What one rank runs."""

    rank: int
    ranks: int
    drafter: torch.device
    targets: tuple[torch.device, ...]

    @property
    def lead(self) -> bool:
        """Whether this rank writes checkpoints, metrics and reports."""
        return self.rank == 0

    @property
    def on_gpus(self) -> bool:
        """Whether batches travel to another device."""
        return any(device.type == "cuda" for device in (self.drafter, *self.targets))

    @property
    def buffers_per_target(self) -> int:
        """Feature buffers: one being trained on and one being filled; one where nothing can overlap."""
        return 1 if all(target == self.drafter for target in self.targets) else 2

    def from_lead(self, make: Callable[[], Shared]) -> Shared:
        """The lead makes something, every rank gets it; they wait for it as long as it takes."""
        if self.ranks == 1:
            return make()
        box = [make() if self.lead else None]
        distributed.broadcast_object_list(box, 0)
        value = box[0]
        assert value is not None
        return value

    def lead_first(self, make: Callable[[], Shared]) -> Shared:
        """Make something on every rank; the lead first, so that the others find its files."""
        if not self.lead:
            distributed.barrier()
            return make()
        value = make()
        if self.ranks > 1:
            distributed.barrier()
        return value


def place(placement: PlacementSettings, rank: Rank) -> RankPlacement:
    """The devices of one rank.

    Raises:
        RecipeError: a device does not exist here, two drafters share a GPU, or the number of processes is not that of
            drafters.
    """
    drafters = [_device(name, "drafters") for name in placement.drafters]
    targets = [_device(name, "targets") for name in placement.targets]
    if rank.count != len(drafters):
        raise RecipeError(
            f"training.placement has {len(drafters)} drafters but {rank.count} training processes run; use "
            "`dflash train`"
        )
    gpus = [device for device in drafters if device.type == "cuda"]
    if len(gpus) not in (0, len(drafters)) or len(set(gpus)) != len(gpus):
        raise RecipeError(
            f"training.placement.drafters {list(placement.drafters)} must be all CPU, or as many different GPUs"
        )
    return RankPlacement(rank.number, rank.count, drafters[rank.number], tuple(targets[rank.number :: rank.count]))


def join(placement: PlacementSettings, rank: Rank) -> RankPlacement:
    """Set up threads, device and, for one of several ranks, the process group (NCCL between GPUs, gloo else).

    Raises:
        RecipeError: see `place`.
        UserError: on a GPU, see `require_compiler`.
    """
    ours = place(placement, rank)
    if placement.threads:
        torch.set_num_threads(placement.threads)
    on_gpu = ours.drafter.type == "cuda"
    if on_gpu:
        require_compiler()
        torch.cuda.set_device(ours.drafter)  # for what does not ask: collectives of Python objects, foreign kernels
    if rank.rendezvous is not None:
        distributed.init_process_group(
            "nccl" if on_gpu else "gloo",
            init_method=rank.rendezvous.absolute().as_uri(),
            rank=rank.number,
            world_size=rank.count,
            timeout=SETUP_TIMEOUT,
            device_id=ours.drafter if on_gpu else None,
        )
    return ours


def require_compiler() -> None:
    """Refuse a machine on which the attention kernel cannot be compiled, before hours of loading.

    Raises:
        UserError: Triton will not find a C compiler, or Python's headers.
    """
    header = Path(sysconfig.get_paths("posix_prefix")["include"]) / "Python.h"
    lacking = [] if any(map(shutil.which, ("gcc", "clang"))) else ["a C compiler (gcc or clang)"]
    lacking += [] if header.is_file() else [f"Python's headers ({header})"]
    if lacking:
        raise UserError(
            f"training on a GPU compiles its attention kernel and lacks {' and '.join(lacking)} here; install them (on "
            "Debian gcc, libc6-dev and, where Python is Debian's own, python3-dev)"
        )


def step_group(placement: PlacementSettings) -> distributed.ProcessGroup | None:
    """All ranks, but impatient: in a step nobody is late, so who does not come is dead. None: there is one rank."""
    if not distributed.is_initialized():
        return None
    # NCCL aborts the process without naming a rank: left for what the host itself has not noticed (`step.Arrival`).
    patience_s = placement.timeout_s * (2 if distributed.get_backend() == "nccl" else 1)
    group: distributed.ProcessGroup = distributed.new_group(timeout=timedelta(seconds=patience_s))
    return group


def _device(name: str, kind: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        raise RecipeError(
            f"training.placement.{kind}: {name!r} is not a device; use cpu or cuda:0, cuda:1, ..."
        ) from None
    if device.type == "cpu":
        return device
    count = torch.cuda.device_count()
    index = device.index or 0
    if device.type != "cuda" or index >= count:
        raise RecipeError(
            f"training.placement.{kind}: {name} does not exist here ({count} CUDA devices); correct the placement"
        )
    return torch.device("cuda", index)
