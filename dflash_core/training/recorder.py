"""What the lead rank keeps of a run: metrics as JSON lines, checkpoints on disk and in the object store.

Writing happens in a thread, one checkpoint at a time: training goes on while 12 bytes a parameter are written, hashed
and uploaded. The price is a copy of them in host memory. In the store a `SavedStep`, written last, names a checkpoint.
"""

import logging
import os
import shutil
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from dflash_core.errors import ObjectCorrupt, ObjectMissing, StorageError
from dflash_core.records import SavedStep
from dflash_core.storage.store import Store
from dflash_core.storage.transfers import delete_object, download_file, upload_file
from dflash_core.training.checkpoint import METRICS, POINTER, STATE, CheckpointFolder, Damaged, Progress, Snapshot
from dflash_core.training.metrics import MetricsFile, Report, StepMetrics
from dflash_core.training.trainer import State

log = logging.getLogger(__name__)

PATIENCE_S = 5.0
"""How long a step may be held up by the checkpoint before; the other ranks wait for it and must not lose patience."""


@dataclass(frozen=True)
class RemoteCheckpoints:
    """The checkpoints of one run in the object store."""

    store: Store
    run: str

    @property
    def below(self) -> str:
        """Prefix of everything here."""
        return f"drafter_checkpoint/{self.run}/checkpoints/"

    def saved(self) -> list[SavedStep]:
        """What can be resumed from, oldest first."""
        keys = [key for key, _, _ in self.store.list(self.below) if key.endswith(".json") and key.count("/") == 3]
        found = (self.store.find_record(key, SavedStep) for key in keys)
        return sorted((record for record in found if record is not None), key=lambda record: record.step)

    def upload(self, folder: Path, progress: Progress, keep: int) -> None:
        """Store a checkpoint folder, then its manifest, then remove all but the last `keep` and the best."""
        step = progress.step
        files = [
            upload_file(self.store, f"{self.below}{step:08d}/{file.name}", file) for file in sorted(folder.iterdir())
        ]
        record = SavedStep(run=self.run, step=step, files=tuple(files))
        self.store.put_record(f"{self.below}{step:08d}.json", record)
        for old in [saved for saved in self.saved() if saved.step < step][: -keep + 1 or None]:
            if old.step != progress.best_step:
                self._remove(old)

    def download(self, saved: SavedStep, folder: Path) -> None:
        """Bring a checkpoint to `folder`, which appears only when every file is right."""
        aside = folder.with_name(f".fetching-{folder.name}")
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        for stored in saved.files:
            download_file(self.store, stored, aside / Path(stored.key).name)
        shutil.rmtree(folder, ignore_errors=True)
        os.rename(aside, folder)

    def clear(self) -> None:
        """Remove everything; the run is finished."""
        for saved in self.saved():
            self._remove(saved)
        for key, _, _ in list(self.store.list(self.below)):
            delete_object(self.store, key)

    def _remove(self, saved: SavedStep) -> None:
        delete_object(self.store, f"{self.below}{saved.step:08d}.json")  # first: it names the others
        for stored in saved.files:
            delete_object(self.store, stored.key)


class LeadRecorder:
    """The recorder of the lead rank."""

    def __init__(
        self, folder: CheckpointFolder, remote: RemoteCheckpoints, metrics: Path, steps_done: int, on_step: Report
    ) -> None:
        self._folder = folder
        self._remote = remote
        self._metrics = MetricsFile(metrics, steps_done)
        self._on_step = on_step
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None

    def step(self, metrics: StepMetrics) -> None:
        """Write the line and show it."""
        self._metrics.write(metrics)
        self._on_step(metrics)

    def save(self, progress: Progress, state: State, coverage: torch.Tensor) -> bool:
        """Write a checkpoint, or leave it out if the one before is slow; a failed write of that one is raised here."""
        if self._writing is not None and not wait([self._writing], PATIENCE_S).done:
            log.warning("no checkpoint after step %d: the one before is still being written", progress.step)
            return False
        self.flush()
        snapshot = Snapshot(progress, *state(), coverage)
        self._writing = self._thread.submit(self._write, snapshot, self._metrics.flush())
        return True

    def flush(self) -> None:
        """Wait for the checkpoint on its way.

        Raises:
            StorageError: it could not be written.
        """
        if self._writing is not None:
            writing, self._writing = self._writing, None
            writing.result()

    def close(self) -> None:
        """End the thread and close the metrics file."""
        self._thread.shutdown()
        self._metrics.flush()
        self._metrics.close()

    def _write(self, snapshot: Snapshot, metrics_bytes: int) -> None:
        folder = self._folder.save(snapshot, self._metrics.path, metrics_bytes)
        try:
            self._remote.upload(folder, snapshot.progress, self._folder.keep)
        except StorageError as error:
            log.warning("the checkpoint of step %d is on this disk only: %s", snapshot.progress.step, error)


def resume(folder: CheckpointFolder, remote: RemoteCheckpoints, metrics: Path) -> Snapshot | None:
    """The newest usable checkpoint of this disk or the store, and its metrics file put in place; None: start anew.

    Raises:
        IncompatibleError: the newest one belongs to something else.
    """
    if folder.pointer_is_damaged:
        log.warning("%s cannot be read; every checkpoint beside it is tried, newest first", folder.path / POINTER)
    candidates = _candidates(folder, remote)
    for candidate in candidates:
        snapshot = _usable(folder, remote, candidate, "trying the one before")
        if snapshot is not None:
            step = snapshot.progress.step
            metrics.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(folder.folder(step) / METRICS, metrics)
            log.info("continuing from the checkpoint of step %d", step)
            return snapshot
    if candidates:
        log.warning("none of %d checkpoints can be used; training starts anew", len(candidates))
    return None


def saved_at(folder: CheckpointFolder, remote: RemoteCheckpoints, step: int) -> Snapshot | None:
    """The checkpoint of one step, from this disk or the store; None where neither has it whole."""
    for candidate in _candidates(folder, remote):
        if candidate.step == step:
            snapshot = _usable(folder, remote, candidate, "looking elsewhere")
            if snapshot is not None:
                return snapshot
    return None


class _Candidate(NamedTuple):
    step: int
    sha256: str
    saved: SavedStep | None
    """None: on this disk."""


def _candidates(folder: CheckpointFolder, remote: RemoteCheckpoints) -> list[_Candidate]:
    """Newest first, and of one step this disk's before the store's."""
    local = [_Candidate(entry["step"], entry["sha256"], None) for entry in folder.entries()]
    stored = [_Candidate(saved.step, _state_sha256(saved), saved) for saved in remote.saved()]
    return sorted([*stored, *local], key=lambda c: (c.step, c.saved is None), reverse=True)


def _usable(
    folder: CheckpointFolder, remote: RemoteCheckpoints, candidate: _Candidate, otherwise: str
) -> Snapshot | None:
    try:
        if candidate.saved is not None:
            remote.download(candidate.saved, folder.folder(candidate.step))
        return folder.load(candidate.step, candidate.sha256)
    except (Damaged, ObjectCorrupt, ObjectMissing) as error:
        log.warning("the checkpoint of step %d cannot be used (%s); %s", candidate.step, error, otherwise)
        return None


def _state_sha256(saved: SavedStep) -> str:
    return next((stored.sha256 for stored in saved.files if stored.key.endswith(f"/{STATE}")), "")
