"""One optimizer step of the drafter on one rank: accumulate micro-batches, reduce, normalise, clip, update.

Gradients are of *sums*; one sum of slot weights over all ranks and micro-batches divides them, so 1, 2 and N ranks and
any accumulation give the same update. All gradients are views into one flat tensor: one norm, and layers leave for the
other ranks while backward still makes the rest (`reduce`).
The trade-off: whether a step is finite is decided on the device and nothing is read back, so the host learns of a
skipped step only when it reads the outcome, one step later.

Shapes: B rows, S tokens, N blocks, K block size, L captured layers, H hidden size, F source files.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import distributed
from torch.profiler import record_function

from dflash_core.drafter.model import Drafter, embed_blocks
from dflash_core.drafter.objective import LossSums, SlotWeights, block_loss
from dflash_core.drafter.target_files import Head
from dflash_core.recipe import Training
from dflash_core.training.arrival import Arrival
from dflash_core.training.feed import Work
from dflash_core.training.reduce import OverlappedSum

MOMENTS = ("step", "exp_avg", "exp_avg_sq")
COVERAGE_COLUMNS = ("rows", "tokens", "blocks", "loss", "weight", "prefix")


class Sums(NamedTuple):
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


COUNTED = Sums._fields.index("grad_norm")
"""The fields before it are counted row by row."""


class Outcome:
    """A step's sums, still on their way to the host."""

    def __init__(self, packed: Arrival) -> None:
        self._packed = packed

    def read(self) -> Sums:
        """Wait for the step to be done.

        Raises:
            StepOverdue: another rank, or the device, hangs.
        """
        values = self._packed.wait().tolist()
        scalars, slots = values[: len(Sums._fields) - 2], values[len(Sums._fields) - 2 :]
        half = len(slots) // 2
        return Sums._make((*scalars, tuple(slots[:half]), tuple(slots[half:])))


@dataclass(frozen=True)
class Rules:
    """How the loss counts and how the update is made."""

    weights: SlotWeights
    clip: float
    betas: tuple[float, float]
    weight_decay: float
    autocast: torch.dtype | None
    """Reduced precision of the forward pass on CUDA; None: the parameters' own."""


def rules(training: Training, gamma: float, device: torch.device) -> Rules:
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
        head: Head,
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

    def accumulate(self, work: Work, features: torch.Tensor) -> None:
        """Forward and backward of a micro-batch with features [B, S, L*H] (which may be overwritten)."""
        usable = clear_bad_rows(features)
        sums = self._loss(work, features, usable)
        if work.batch.last and self._reduction is not None:
            self._reduction.arm()
        with record_function("backward"):
            sums.loss.backward()  # type: ignore[no-untyped-call]
        self._count(work, sums, usable)

    @record_function("update")
    def update(self, learning_rate: float, stop: bool) -> Outcome:
        """Finish the step; every rank calls it, also one that had no row."""
        self._counted[Sums._fields.index("stop")].fill_(float(stop))
        packed = torch.cat((self._counted, self._slots))
        if self._reduction is not None:
            self._reduction.finish()
            distributed.all_reduce(packed, group=self.group)
        loss, weight = packed[Sums._fields.index("loss")], packed[Sums._fields.index("weight")]
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
    def evaluate(self, work: Work, features: torch.Tensor) -> None:
        """Count a held-out micro-batch; `evaluated` hands the sums out."""
        usable = clear_bad_rows(features)
        self._count(work, self._loss(work, features, usable), usable)

    def evaluated(self) -> Sums:
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

    def _loss(self, work: Work, features: torch.Tensor, usable: torch.Tensor) -> LossSums:
        K, dtype = self.drafter.config.block_size, self._flat.dtype
        slots = embed_blocks(self.head.embedding, work.anchor_tokens, self.drafter.config, K)
        with torch.autocast(self.device.type, self.rules.autocast, enabled=self.rules.autocast is not None):
            if self.rules.autocast is None:
                features, slots = features.to(dtype), slots.to(dtype)
            with record_function("drafter"):
                hidden = self.drafter(features, work.positions, slots, work.blocks)
        hidden = torch.where(usable[:, None, None], hidden, 0.0)  # no gradient from rows without features
        with record_function("objective"):
            return block_loss(hidden, self.head.lm_head, work.targets, self.rules.weights)

    @torch.no_grad()
    def _count(self, work: Work, sums: LossSums, usable: torch.Tensor) -> None:
        rows = torch.ones_like(sums.row_loss)
        by_row = torch.stack(
            [
                column.to(torch.float64)
                for column in (rows, work.lengths, sums.row_blocks, sums.row_loss, sums.row_weight, sums.row_prefix)
            ],
            dim=1,
        )
        by_row = torch.where(usable[:, None], by_row, 0.0)
        self._step_coverage.index_add_(0, work.files, by_row)
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
