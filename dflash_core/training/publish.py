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
from dflash_core.drafter.folder import CONFIG_FILE, WEIGHTS_FILE, save_drafter
from dflash_core.drafter.runs import LATEST, checkpoint_key
from dflash_core.records import DrafterCheckpoint, FileCoverage, RunPointer
from dflash_core.storage.store import Store
from dflash_core.storage.transfers import upload_file
from dflash_core.training.checkpoint import METRICS, CheckpointFolder, Progress
from dflash_core.training.curve import learning_curve
from dflash_core.training.recorder import RemoteCheckpoints, saved_at
from dflash_core.training.step import COVERAGE_COLUMNS

log = logging.getLogger(__name__)

CURVE = "learning_curve.png"
CHECKPOINTS = "checkpoints"
"""Of a run's folder: the local ones."""


@dataclass(frozen=True)
class RunFiles:
    """Where a run keeps what it writes."""

    store: Store
    run: str
    folder: Path
    checkpoints: CheckpointFolder
    remote: RemoteCheckpoints

    @property
    def metrics(self) -> Path:
        """JSON lines, one a step."""
        return self.folder / METRICS


@dataclass(frozen=True)
class Outcome:
    """A finished training."""

    progress: Progress
    config: DrafterConfig
    masters: dict[str, torch.Tensor]
    published_step: int
    coverage: torch.Tensor
    """[F, 6] over all ranks."""


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
    best = saved_at(files.checkpoints, files.remote, progress.best_step) if publish == "best" else None
    if best is None:
        log.warning('the last one is published (training.publish = "%s")', publish)
        return progress.step, last
    return progress.best_step, best.masters


def publish_run(
    files: RunFiles, made_from: dict[str, Any], outcome: Outcome, partitions: list[str]
) -> DrafterCheckpoint:
    """Upload weights, config and metrics, then the manifest that names them, then the pointer to it."""
    below = f"drafter_checkpoint/{files.run}/"
    final = files.folder / "final"
    final.mkdir(exist_ok=True)
    save_drafter(final, outcome.config, outcome.masters, torch.float32, shard_bytes=1 << 62)
    curve = final / CURVE
    curve.write_bytes(learning_curve(files.metrics))
    progress = outcome.progress
    last = outcome.published_step == progress.step
    checkpoint = DrafterCheckpoint(
        **made_from,
        steps=progress.step,
        train_s=progress.train_s,
        final_loss=progress.final_loss,
        held_out_accepted_prefix=progress.held_out_accepted_prefix if last else progress.best_accepted_prefix,
        weights=upload_file(files.store, below + WEIGHTS_FILE, final / WEIGHTS_FILE),
        config=upload_file(files.store, below + CONFIG_FILE, final / CONFIG_FILE),
        metrics=upload_file(files.store, below + METRICS, files.metrics),
        curve=upload_file(files.store, below + CURVE, curve),
        coverage=_coverage(outcome.coverage, partitions),
        skipped_steps=progress.skipped_steps,
        skipped_rows=progress.skipped_rows,
        published_step=outcome.published_step,
        best_step=progress.best_step,
        best_accepted_prefix=progress.best_accepted_prefix,
    )
    files.store.put_record(checkpoint_key(files.run), checkpoint)
    files.store.put_record(LATEST, RunPointer(run=files.run))
    clear_checkpoints(files.remote, files.checkpoints.path)
    return checkpoint


def clear_checkpoints(remote: RemoteCheckpoints, local: Path) -> None:
    """Remove what a finished run no longer needs; where nothing is left, nothing happens."""
    remote.clear()
    shutil.rmtree(local, ignore_errors=True)


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
