"""The end of a run: which weights are published, and in which order: objects, manifest, pointer.

The trade-off: the last step's weights are the drafter unless the recipe asks for the best checkpoint's, so that what is
published follows from the recipe alone; where they differ it is said aloud and recorded.
"""

import logging
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from dflash_core.drafter.config import DrafterConfig
from dflash_core.drafter.folder import save_drafter
from dflash_core.records import DrafterCheckpoint, FileCoverage, RunPointer
from dflash_core.reports.plots import learning_curve
from dflash_core.storage.layout import CONFIG_FILE, CURVE_FILE, LATEST_RUN, METRICS_FILE, WEIGHTS_FILE, RunKeys
from dflash_core.storage.s3 import Store
from dflash_core.training.checkpoint import CheckpointFolder, Progress, StoredCheckpoints, saved_at
from dflash_core.training.step import COVERAGE_COLUMNS

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunFiles:
    """What a run writes, on this disk and in the store."""

    store: Store
    keys: RunKeys
    folder: Path
    checkpoints: CheckpointFolder

    @property
    def stored_checkpoints(self) -> StoredCheckpoints:
        """Those in the store."""
        return StoredCheckpoints(self.store, self.keys)

    @property
    def metrics(self) -> Path:
        """JSON lines, one a step."""
        return self.folder / METRICS_FILE


@dataclass(frozen=True)
class TrainingResult:
    """A finished training."""

    progress: Progress
    config: DrafterConfig
    masters: dict[str, torch.Tensor]
    """Of the last step."""
    coverage: torch.Tensor
    """[F, 6] over all ranks."""


def publish_run(
    files: RunFiles,
    made_from: dict[str, Any],
    result: TrainingResult,
    partitions: list[str],
    publish: Literal["last", "best"],
) -> DrafterCheckpoint:
    """Upload weights, config and metrics, then the manifest that names them, then the pointer to it.

    Args:
        files: of the run.
        made_from: fields of the manifest that say what the drafter was made from.
        result: what training gave.
        partitions: [F] of the training set.
        publish: which weights.
    """
    store, keys, progress = files.store, files.keys, result.progress
    step, masters = choose_weights(publish, files, progress, result.masters)
    final = files.folder / "final"
    final.mkdir(exist_ok=True)
    save_drafter(final, result.config, masters, torch.float32, shard_bytes=1 << 62)
    (final / CURVE_FILE).write_bytes(learning_curve(files.metrics))
    last = step == progress.step
    checkpoint = DrafterCheckpoint(
        **made_from,
        steps=progress.step,
        train_s=progress.train_s,
        final_loss=progress.final_loss,
        held_out_accepted_prefix=progress.held_out_accepted_prefix if last else progress.best_accepted_prefix,
        weights=store.upload(keys.weights, final / WEIGHTS_FILE),
        config=store.upload(keys.config, final / CONFIG_FILE),
        metrics=store.upload(keys.metrics, files.metrics),
        curve=store.upload(keys.curve, final / CURVE_FILE),
        coverage=_coverage(result.coverage, partitions),
        skipped_steps=progress.skipped_steps,
        skipped_rows=progress.skipped_rows,
        published_step=step,
        best_step=progress.best_step,
        best_accepted_prefix=progress.best_accepted_prefix,
    )
    store.put_record(keys.manifest, checkpoint)
    settle_finished(files)
    return checkpoint


def settle_finished(files: RunFiles) -> None:
    """Name a finished run the latest and remove the checkpoints it no longer needs, as far as that is still to do."""
    files.store.put_record(LATEST_RUN, RunPointer(run=files.keys.run))
    files.stored_checkpoints.clear()
    shutil.rmtree(files.checkpoints.path, ignore_errors=True)


def choose_weights(
    publish: Literal["last", "best"], files: RunFiles, progress: Progress, last: dict[str, torch.Tensor]
) -> tuple[int, dict[str, torch.Tensor]]:
    """The step and the weights to publish."""
    if progress.best_step in (0, progress.step):
        return progress.step, last
    log.warning(
        "the checkpoint of step %d had a held-out accepted prefix of %.3f, the last step %d has %.3f",
        progress.best_step,
        progress.best_accepted_prefix,
        progress.step,
        progress.held_out_accepted_prefix,
    )
    best = saved_at(files.checkpoints, files.stored_checkpoints, progress.best_step) if publish == "best" else None
    if best is None:
        log.warning('the last one is published (training.publish = "%s")', publish)
        return progress.step, last
    return progress.best_step, best.masters


def _coverage(sums: torch.Tensor, partitions: list[str]) -> tuple[FileCoverage, ...]:
    assert COVERAGE_COLUMNS == ("rows", "tokens", "blocks", "loss", "weight", "prefix")
    return tuple(
        FileCoverage(
            partition=partition,
            rows=int(rows),
            tokens=int(tokens),
            blocks=int(blocks),
            mean_loss=loss / weight if weight else 0.0,
            joint_accepted_prefix=1.0 + (prefix / blocks if blocks else 0.0),
        )
        for partition, (rows, tokens, blocks, loss, weight, prefix) in zip(partitions, sums.tolist(), strict=True)
    )
