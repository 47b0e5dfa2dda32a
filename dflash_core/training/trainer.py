"""The training loop: micro-batches in, metrics and checkpoints out. Read `Trainer.run`; the rest is one hop away.

Read step n's sums only after queuing a micro-batch of step n + 1: a device never idles while the host looks at a
number, and a dead peer stops us after one step. Before a checkpoint, a validation or the end everything is read.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import distributed

from dflash_core.batches.loader import Batch, Loader, Prefetch
from dflash_core.batches.order import Rows
from dflash_core.errors import TrainingStopped, UserError
from dflash_core.recipe import TrainingSettings
from dflash_core.training.checkpoint import Progress, RunRecorder
from dflash_core.training.features import FeatureFeed, Preparation, PreparedBatch, prepare
from dflash_core.training.job import StopRequest
from dflash_core.training.metrics import Clock, StepMetrics
from dflash_core.training.step import Learner, Outcome, StepSums, learning_rate

PREFETCH = 4
BAD_ROWS_TOLERATED = 16
"""Fewer than this never end a run, whatever share they are."""


class Pending(NamedTuple):
    """A step whose outcome has not been read."""

    step: int
    epoch: int
    learning_rate: float
    outcome: Outcome


class Measured(NamedTuple):
    """What was measured on held-out rows after a step; None: nothing was."""

    held_out: StepSums | None
    acceptance_length: float | None


@dataclass(frozen=True)
class TrainingData:
    """Where a rank's micro-batches come from."""

    loader: Loader
    held_out: list[Batch]
    """What is validated on."""
    preparation: Preparation
    held_out_rows: Rows
    """All that training never sees, of every rank."""

    def prepared(self, batches: Iterable[Batch]) -> Iterator[PreparedBatch]:
        """Micro-batches with all that the host can say about them."""
        return (prepare(batch, self.preparation) for batch in batches)


class Trainer:
    """One rank's loop. All ranks take every decision from the same reduced numbers, so they never disagree."""

    def __init__(
        self,
        training: TrainingSettings,
        data: TrainingData,
        feed: FeatureFeed,
        learner: Learner,
        steps: int,
        recorder: RunRecorder | None,
        probe: Callable[[], float] | None = None,
    ) -> None:
        """
        Args:
            training: the recipe's table.
            data: this rank's.
            feed: this rank's targets.
            learner: this rank's drafter.
            steps: the last optimizer step.
            recorder: the lead's; None on the other ranks.
            probe: the lead's, which measures the acceptance length every `acceptance_every_steps`; None: nobody's.
        """
        self.training = training
        self.data = data
        self.feed = feed
        self.learner = learner
        self.steps = steps
        self.recorder = recorder
        self.probe = probe
        self.progress = Progress()
        self._pending: deque[Pending] = deque()
        self._clock = Clock()
        self._stop_agreed = False

    def run(self, progress: Progress, stop: StopRequest) -> Progress:
        """Train from `progress.step` to the last step.

        Raises:
            TrainingStopped: asked to stop; a checkpoint was saved.
            UserError: too many skipped steps in a row, or too many rows with bad features.
        """
        self.progress = progress
        self._await_lead()
        batches = self.data.loader.batches(progress.step, self.steps)
        with Prefetch(self.data.prepared(batches), PREFETCH) as prefetch:
            for prepared, features in self.feed.feed(prefetch):
                batch = prepared.batch
                if features is not None:
                    self.learner.accumulate(prepared, features)
                if not batch.last:
                    self._read(0, prefetch.waited_s)
                    continue
                rate = learning_rate(batch.step, self.steps, self.training)
                outcome = self.learner.update(rate, stop.asked)
                self._pending.append(Pending(batch.step, batch.epoch, rate, outcome))
                # One rank need not agree with others, so it need not wait for its own flag to come back.
                self._stop_agreed = self._stop_agreed or (self.learner.ranks == 1 and stop.asked)
                self._after_step(batch.step + 1, prefetch.waited_s)
        return self.progress

    def _after_step(self, done: int, waited_s: float) -> None:
        """Read what is due, validate, save, stop: the same on every rank."""
        end = done == self.steps
        validate = end or done % self.training.validate_every_steps == 0
        save = end or done % self.training.checkpoint_every_steps == 0
        every = self.training.acceptance_every_steps
        probe = every > 0 and (end or done % every == 0)
        self._read(0 if validate or save or probe else 1, waited_s, validate, probe)
        if self._stop_agreed and not end:
            self._read(0, waited_s)
            self._save_for_sure()
            raise TrainingStopped(
                f"training stopped after step {self.progress.step} of {self.steps}; a checkpoint was saved, the same "
                "command continues from it"
            )
        if end:
            self._save_for_sure()
        elif save:
            self._save()

    def _read(self, leave: int, waited_s: float, validate: bool = False, probe: bool = False) -> None:
        """Take in the outcomes of all steps but the last `leave`; measure after the very last."""
        while len(self._pending) > leave:
            pending = self._pending.popleft()
            sums = pending.outcome.read()
            last = not self._pending
            held_out = self.validate() if validate and last else None
            acceptance = self.measure_acceptance() if probe and last else None
            self._advance(pending, sums, Measured(held_out, acceptance), waited_s)

    def _advance(self, pending: Pending, sums: StepSums, measured: Measured, waited_s: float) -> None:
        """Enter a finished step into progress and metrics.

        Raises:
            UserError: it is one bad step or one bad row too many.
        """
        seconds, waiting = self._clock.lap(waited_s)
        before, skipped = self.progress, sums.finite == 0.0
        held_out = measured.held_out
        done = pending.step + 1
        self._stop_agreed = self._stop_agreed or sums.stop > 0
        self.progress = replace(
            before,
            step=done,
            rows=before.rows + int(sums.rows),
            skipped_steps=before.skipped_steps + skipped,
            consecutive_skips=before.consecutive_skips + 1 if skipped else 0,
            skipped_rows=before.skipped_rows + int(sums.bad_rows),
            train_s=before.train_s + seconds,
            final_loss=before.final_loss if skipped else sums.mean_loss,
            held_out_loss=held_out.mean_loss if held_out else before.held_out_loss,
            held_out_accepted_prefix=held_out.accepted_prefix if held_out else before.held_out_accepted_prefix,
            validated_step=done if held_out else before.validated_step,
        )
        if self.recorder is not None:
            metrics = StepMetrics(
                step=done,
                steps=self.steps,
                epoch=pending.epoch,
                loss=None if skipped else sums.mean_loss,
                accepted_prefix=sums.accepted_prefix,
                slot_accuracy=tuple(h / max(1.0, n) for h, n in zip(sums.slot_hits, sums.slot_counts, strict=True)),
                learning_rate=pending.learning_rate,
                grad_norm=None if skipped else sums.grad_norm,
                rows=int(sums.rows),
                tokens=int(sums.tokens),
                skipped=skipped,
                bad_rows=int(sums.bad_rows),
                tokens_per_s=sums.tokens / seconds,
                waiting_share=waiting,
                eta_s=self._clock.eta_s(self.steps - done),
                held_out_loss=held_out.mean_loss if held_out else None,
                held_out_accepted_prefix=held_out.accepted_prefix if held_out else None,
                acceptance_length=measured.acceptance_length,
            )
            self.recorder.step(metrics)
        self._refuse_bad(sums)

    def _refuse_bad(self, sums: StepSums) -> None:
        now, limit = self.progress, self.training.skips_before_stop
        if now.consecutive_skips >= limit:
            raise UserError(
                f"the last {limit} steps up to step {now.step} had no finite loss and gradient (gradient norm "
                f"{sums.grad_norm}), so training ends; the checkpoints before are good: lower training.learning_rate "
                "or look at the data of these steps"
            )
        share = now.skipped_rows / max(1, now.rows + now.skipped_rows)
        if now.skipped_rows >= BAD_ROWS_TOLERATED and share > self.training.max_bad_row_share:
            raise UserError(
                f"{now.skipped_rows} of {now.rows + now.skipped_rows} rows up to step {now.step} were left out because "
                "the target gave NaN or infinite features for them, more than training.max_bad_row_share allows; check "
                "target.path and target.dtype"
            )

    def validate(self) -> StepSums | None:
        """Sums over the held-out rows of all ranks, always with the same anchors; None where there is nothing."""
        self.learner.drafter.eval()
        for prepared, features in self.feed.aside().feed(self.data.prepared(self.data.held_out)):
            assert features is not None
            self.learner.evaluate(prepared, features)
        self.learner.drafter.train()
        sums = self.learner.evaluated()
        return sums if sums.weight > 0 or math.isnan(sums.weight) else None

    def measure_acceptance(self) -> float | None:
        """The lead decodes, the others wait; None on them, and where the lead has no probe."""
        acceptance = None if self.probe is None else self.probe()
        self._await_lead()
        return acceptance

    def _await_lead(self) -> None:
        """Wait for the lead as long as it takes: it may be writing, and a step's patience is short.

        A process that stands still meanwhile is noticed by the starter (`ranks`).
        """
        if self.learner.ranks > 1:
            distributed.barrier()

    def _save(self) -> None:
        progress, coverage = self.progress.with_best(), self.learner.reduced_coverage()
        if self.recorder is not None and self.recorder.save(progress, self.learner.state, coverage):
            self.progress = progress

    def _save_for_sure(self) -> None:
        self._flush()
        self._save()
        self._flush()

    def _flush(self) -> None:
        """No rank goes on before the lead's checkpoint is safe: the first to end may take the others with it."""
        if self.recorder is not None:
            self.recorder.flush()
        self._await_lead()
