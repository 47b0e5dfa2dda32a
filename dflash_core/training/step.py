"""One optimizer step of the drafter on one rank: accumulate micro-batches, reduce, normalise, clip, update.

Gradients are of *sums*; one sum of slot weights over all ranks and micro-batches divides them, so 1, 2 and N ranks and
any accumulation give the same update. All gradients are views into one flat tensor: one norm, and layers leave for the
other ranks while backward still makes the rest (`OverlappedSum`).
The trade-off: whether a step is finite is decided on the device and nothing is read back, so the host learns of a
skipped step only when it reads the sums, one step later.

Shapes: B rows, S tokens, N blocks, K block size, L captured layers, H hidden size, F source files.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import distributed, nn
from torch.profiler import record_function

from dflash_core.drafter.model import Drafter, embed_blocks
from dflash_core.drafter.objective import LossSums, SlotWeights, block_loss
from dflash_core.recipe import TrainingSettings
from dflash_core.target.files import TargetHead
from dflash_core.training.features import PreparedBatch

MOMENTS = ("step", "exp_avg", "exp_avg_sq")
COVERAGE_COLUMNS = ("rows", "tokens", "blocks", "loss", "weight", "prefix")
DECAY_SHARE = 0.2
"""Last part of a WSD (warm-up, stable, decay) run, in which the rate falls linearly to zero."""
POLL_S = 0.001


def learning_rate(step: int, steps: int, training: TrainingSettings) -> float:
    """Rate of step `step` (from 0) of `steps`: linear warm-up, then cosine to zero, or constant and a linear decay.

    A pure function of the step: nothing to save, nothing to be off by one after a resume.
    """
    warmup = round(training.warmup_share * steps)
    if step < warmup:
        return training.learning_rate * (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    if training.schedule == "cosine":
        return training.learning_rate * 0.5 * (1.0 + math.cos(math.pi * done))
    return training.learning_rate * min(1.0, (1.0 - done) / DECAY_SHARE)


class StepSums(NamedTuple):
    """What a step counts, summed over rows; over all ranks once the step is done. Floats on the host."""

    loss: float
    """Sum of weight * cross-entropy, nats."""
    weight: float
    rows: float
    tokens: float
    blocks: float
    prefix: float
    """Summed length of the all-correct prefixes, anchors not counted."""
    bad_rows: float
    """Rows left out because the target gave non-finite features."""
    stop: float
    """Ranks that were asked to stop."""
    grad_norm: float
    """Before clipping."""
    finite: float
    """1.0 if the update was made, 0.0 if loss or gradient were not finite or no slot was supervised."""
    slot_hits: tuple[float, ...]
    """[K-1]"""
    slot_counts: tuple[float, ...]
    """[K-1]"""

    @property
    def mean_loss(self) -> float:
        """Weighted mean cross-entropy, NaN where nothing was supervised."""
        return self.loss / self.weight if self.weight else math.nan

    @property
    def accepted_prefix(self) -> float:
        """Mean over blocks of the all-correct prefix, plus one (the anchor)."""
        return 1.0 + (self.prefix / self.blocks if self.blocks else 0.0)


COUNTED = StepSums._fields.index("grad_norm")
"""The fields before it are counted row by row."""


class StepOverdue(Exception):
    """The device does not come to the end of a step."""


class Arrival:
    """A tensor on its way from a device to the host; make it right after the work whose end is waited for.

    A device that waits for another rank's part of a sum waits forever, and NCCL's own watchdog ends the process without
    a word. So the host asks every millisecond instead of sleeping in the driver, and can tell who waits.
    """

    def __init__(self, tensor: torch.Tensor, patience_s: float | None) -> None:
        """`patience_s`: from `wait` on; None: as long as it takes, where no other rank is waited for."""
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


class Outcome:
    """A step's sums, still on their way to the host."""

    def __init__(self, arrival: Arrival) -> None:
        self._arrival = arrival

    def read(self) -> StepSums:
        """Wait for the step to be done.

        Raises:
            StepOverdue: another rank, or the device, hangs.
        """
        values = self._arrival.wait().tolist()
        scalars, slots = values[: len(StepSums._fields) - 2], values[len(StepSums._fields) - 2 :]
        half = len(slots) // 2
        return StepSums._make((*scalars, tuple(slots[:half]), tuple(slots[half:])))


class OverlappedSum:
    """Sums the gradient over the ranks, part by part, while backward is still making the rest.

    One all-reduce for each decoder layer's gradient, last layer first, as backward ends them, and one for what is
    around the layers. Every rank sends them in that one order whatever its own timing; a finer cut would hide a little
    more of the time and cost more launches.
    """

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
        for sum_under_way in self._under_way:
            sum_under_way.wait()
        self._begin(armed=False)

    def _begin(self, armed: bool) -> None:
        self._armed = armed
        self._left = list(self._members)
        self._sent = 0
        self._under_way: list[distributed.Work] = []

    def _hook(self, position: int) -> Callable[[torch.Tensor], None]:
        def made(_parameter: torch.Tensor) -> None:
            if not self._armed:
                return
            self._left[position] -= 1
            while self._sent < len(self._parts) and self._left[self._sent] == 0:
                self._send()

        return made

    def _send(self) -> None:
        under_way = distributed.all_reduce(self._parts[self._sent], group=self._group, async_op=True)
        assert under_way is not None
        self._under_way.append(under_way)
        self._sent += 1


@dataclass(frozen=True)
class Rules:
    """How the loss counts and how the update is made."""

    weights: SlotWeights
    clip: float
    betas: tuple[float, float]
    weight_decay: float
    autocast: torch.dtype | None
    """Reduced precision of the forward pass on CUDA; None: the parameters' own."""


def rules(training: TrainingSettings, gamma: float, device: torch.device) -> Rules:
    """The recipe's rules on this device."""
    return Rules(
        weights=SlotWeights(training.loss, gamma, training.dpace_alpha),
        clip=training.clip,
        betas=training.betas,
        weight_decay=training.weight_decay,
        autocast=torch.bfloat16 if training.autocast and device.type == "cuda" else None,
    )


class Learner:
    """Drafter, optimizer and running sums of one rank."""

    def __init__(
        self,
        drafter: Drafter,
        head: TargetHead,
        rules: Rules,
        files: int,
        group: distributed.ProcessGroup | None = None,
        patience_s: float | None = None,
    ) -> None:
        """`group`: the ranks to reduce over; None: all there are. `patience_s`: how long to wait for others on CUDA."""
        self.group = group
        self.drafter = drafter.train()
        self.head = head
        self.rules = rules
        self.device = drafter.fc.weight.device
        self.ranks = distributed.get_world_size() if distributed.is_initialized() else 1
        self._patience_s = patience_s if self.ranks > 1 else None
        parameters = list(drafter.parameters())
        self._flat = torch.zeros(sum(p.numel() for p in parameters), dtype=parameters[0].dtype, device=self.device)
        parts = torch.split(self._flat, [p.numel() for p in parameters])
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.grad = part.view_as(parameter)
        self._reduction = OverlappedSum(drafter, self._flat, group) if self.ranks > 1 else None
        self.optimizer = torch.optim.AdamW(
            parameters, lr=0.0, betas=rules.betas, weight_decay=rules.weight_decay, fused=True
        )
        for parameter in parameters:  # as the optimizer does at its first step, so that there is always a state to save
            self.optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=self.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
        slots = 2 * (drafter.config.block_size - 1)
        self._counted = torch.zeros(COUNTED, dtype=torch.float64, device=self.device)
        self._slots = torch.zeros(slots, dtype=torch.float64, device=self.device)
        self._step_coverage = torch.zeros(files, len(COVERAGE_COLUMNS), dtype=torch.float64, device=self.device)
        self.coverage = torch.zeros_like(self._step_coverage)
        """[F, 6] sums of `COVERAGE_COLUMNS` over the rows this rank has trained on."""

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Copies in host memory: parameters by name, and optimizer state by `<kind>.<name>`."""
        masters, moments = self.live_state()
        return (
            {name: tensor.detach().to("cpu", copy=True) for name, tensor in masters.items()},
            {name: tensor.detach().to("cpu", copy=True) for name, tensor in moments.items()},
        )

    def live_state(self) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """The same, but the tensors that training changes: copy into them to restore."""
        masters = {name: parameter.detach() for name, parameter in self.drafter.named_parameters()}
        moments = {
            f"{kind}.{name}": self.optimizer.state[parameter][kind]
            for name, parameter in self.drafter.named_parameters()
            for kind in MOMENTS
        }
        return masters, moments

    def accumulate(self, prepared: PreparedBatch, features: torch.Tensor) -> None:
        """Forward and backward of a micro-batch with features [B, S, L*H] (which may be overwritten)."""
        # A row with a NaN among its features must not spoil the other rows: it is zeroed, it gives no gradient and
        # is not counted, all without asking the device which one it was.
        usable = clear_bad_rows(features)
        sums = self._loss(prepared, features, usable)
        if prepared.batch.last and self._reduction is not None:
            self._reduction.arm()
        with record_function("backward"):
            # Of the *sum*, so micro-batches and ranks just add up in `_flat`; `update` divides, once.
            sums.loss.backward()  # type: ignore[no-untyped-call]
        self._count(prepared, sums, usable)

    @record_function("update")
    def update(self, learning_rate: float, stop: bool) -> Outcome:
        """Finish the step; every rank calls it, also one that had no row."""
        self._counted[StepSums._fields.index("stop")].fill_(float(stop))
        packed = torch.cat((self._counted, self._slots))
        # Gradient and counts of all ranks are summed, then every rank divides by the same weight, clips by the same
        # norm and makes the same update: nobody has to tell anybody what came of it.
        if self._reduction is not None:
            self._reduction.finish()
            distributed.all_reduce(packed, group=self.group)
        loss, weight = packed[StepSums._fields.index("loss")], packed[StepSums._fields.index("weight")]
        self._flat.div_(weight.to(self._flat.dtype))  # without a supervised slot 0 / 0, which is not finite
        norm = torch.linalg.vector_norm(self._flat)
        finite = torch.isfinite(norm) & torch.isfinite(loss)
        self._flat.mul_((self.rules.clip / (norm + 1e-6)).clamp(max=1.0))
        # What GradScaler uses to let the fused optimizer leave everything as it is, without asking the host.
        self.optimizer.found_inf = (~finite).to(torch.float32)  # type: ignore[attr-defined]
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()
        self.coverage += torch.where(finite, self._step_coverage, 0.0)
        outcome = self._outcome(packed, torch.stack((norm, finite.to(norm.dtype))))
        for running in (self._flat, self._counted, self._slots, self._step_coverage):
            running.zero_()
        return outcome

    def reduced_coverage(self) -> torch.Tensor:
        """[F, 6] over all ranks, in host memory; every rank calls it."""
        coverage = self.coverage.clone()
        if self.ranks > 1:
            distributed.all_reduce(coverage, group=self.group)
        return Arrival(coverage, self._patience_s).wait()

    @torch.no_grad()
    def evaluate(self, prepared: PreparedBatch, features: torch.Tensor) -> None:
        """Count a held-out micro-batch; `evaluated` hands the sums out."""
        usable = clear_bad_rows(features)
        self._count(prepared, self._loss(prepared, features, usable), usable)

    def evaluated(self) -> StepSums:
        """The sums of the held-out micro-batches over all ranks; every rank calls it, between two steps."""
        packed = torch.cat((self._counted, self._slots))
        if self.ranks > 1:
            distributed.all_reduce(packed, group=self.group)
        for running in (self._counted, self._slots, self._step_coverage):
            running.zero_()
        return self._outcome(packed, torch.zeros_like(packed[:2])).read()

    def _outcome(self, packed: torch.Tensor, of_update: torch.Tensor) -> Outcome:
        parts = (packed[:COUNTED], of_update, packed[COUNTED:])
        return Outcome(Arrival(torch.cat(parts), self._patience_s))

    def _loss(self, prepared: PreparedBatch, features: torch.Tensor, usable: torch.Tensor) -> LossSums:
        K, dtype = self.drafter.config.block_size, self._flat.dtype
        slots = embed_blocks(self.head.embedding, prepared.anchor_tokens, self.drafter.config, K)
        with torch.autocast(self.device.type, self.rules.autocast, enabled=self.rules.autocast is not None):
            if self.rules.autocast is None:
                features, slots = features.to(dtype), slots.to(dtype)
            with record_function("drafter"):
                hidden = self.drafter(features, prepared.positions, slots, prepared.blocks)
        hidden = torch.where(usable[:, None, None], hidden, 0.0)  # no gradient from rows without features
        with record_function("objective"):
            return block_loss(hidden, self.head.lm_head, prepared.targets, self.rules.weights)

    @torch.no_grad()
    def _count(self, prepared: PreparedBatch, sums: LossSums, usable: torch.Tensor) -> None:
        rows = torch.ones_like(sums.row_loss)
        by_row = torch.stack(
            [
                column.to(torch.float64)
                for column in (rows, prepared.lengths, sums.row_blocks, sums.row_loss, sums.row_weight, sums.row_prefix)
            ],
            dim=1,
        )
        by_row = torch.where(usable[:, None], by_row, 0.0)
        self._step_coverage.index_add_(0, prepared.files, by_row)
        rows_, tokens, blocks, loss, weight, prefix = by_row.sum(0)
        bad, stop = (~usable).sum(), torch.zeros_like(loss)
        self._counted += torch.stack((loss, weight, rows_, tokens, blocks, prefix, bad.to(torch.float64), stop))
        self._slots += (torch.cat((sums.slot_hits, sums.slot_counts), 1) * usable[:, None]).sum(0)


def clear_bad_rows(features: torch.Tensor) -> torch.Tensor:
    """Zero the rows of `features` [B, S, L*H] that hold a NaN or an infinity; returns which rows [B] are good."""
    wide = torch.promote_types(features.dtype, torch.float32)
    usable = torch.isfinite(torch.linalg.vector_norm(features, dim=(1, 2), dtype=wide))
    features.masked_fill_(~usable[:, None, None], 0.0)
    return usable
