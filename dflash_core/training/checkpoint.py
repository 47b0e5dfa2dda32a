"""Checkpoints that survive a crash at any instant, on this disk and in the object store, written in a thread.

    <folder>/00000200/{masters,moments}*.safetensors coverage.safetensors metrics.jsonl state.json
    <folder>/latest.json       {"checkpoints": [{"step": 200, "sha256": "<of state.json>"}, ...]}, newest last

The last `keep` are kept, and the best. `state.json` holds the sha256 of every other file. A checkpoint is built under
another name, synced, renamed, and only then named by the pointer; in the store a `SavedStep`, written last, names it.
It belongs to one run: what it was made from (`identity`) is compared field by field before anything is loaded.

The trade-off: each save writes everything, 12 bytes a parameter, from a copy in host memory; in exchange training goes
on while it is written, hashed and uploaded.
"""

import json
import logging
import math
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from dflash_core.drafter.folder import save_tensors
from dflash_core.errors import IncompatibleError, ObjectCorrupt, ObjectMissing, StorageError
from dflash_core.local_files import place, sha256_file, write_whole
from dflash_core.records import SavedStep, StoredObject
from dflash_core.storage.layout import METRICS_FILE, RunKeys
from dflash_core.storage.s3 import Store
from dflash_core.training.metrics import MetricsFile, OnStep, StepMetrics

log = logging.getLogger(__name__)

FORMAT = 1
POINTER_FILE = "latest.json"
STATE_FILE = "state.json"
UNSET = "not set"
"""Stands for a setting that is not among those of an identity."""
PART_BYTES = 1 << 30
"""Tensors are grouped into files of about this size, small enough for one PUT."""
PATIENCE_S = 5.0
"""How long a step may be held up by the checkpoint before; the other ranks wait for it and must not lose patience."""


@dataclass(frozen=True)
class Progress:
    """How far a run is. Everything else that a step depends on follows from the seed and the step."""

    step: int = 0
    """Optimizer steps done, skipped ones included."""
    rows: int = 0
    skipped_steps: int = 0
    consecutive_skips: int = 0
    skipped_rows: int = 0
    train_s: float = 0.0
    final_loss: float = 0.0
    """Of the last step that was not skipped."""
    held_out_loss: float = 0.0
    held_out_accepted_prefix: float = 0.0
    validated_step: int = 0
    """After which step the two were measured."""
    best_step: int = 0
    """The checkpoint with the longest held-out accepted prefix so far, its loss deciding ties; 0: none."""
    best_loss: float = 0.0
    best_accepted_prefix: float = 0.0

    def with_best(self) -> "Progress":
        """The same as it is saved: a checkpoint that was validated at its own step may become the best.

        One with a NaN never does, and of equals the earlier one stays.
        """
        score = (self.held_out_accepted_prefix, -self.held_out_loss)
        if self.validated_step != self.step or not all(map(math.isfinite, score)):
            return self
        if self.best_step and score <= (self.best_accepted_prefix, -self.best_loss):
            return self
        return replace(self, best_step=self.step, best_loss=self.held_out_loss, best_accepted_prefix=score[0])


@dataclass(frozen=True)
class Snapshot:
    """Everything of a checkpoint but its metrics file."""

    progress: Progress
    masters: dict[str, torch.Tensor]
    """The drafter's parameters by published name."""
    moments: dict[str, torch.Tensor]
    """`<exp_avg | exp_avg_sq | step>.<parameter>`."""
    coverage: torch.Tensor
    """[F, 6], see `step.COVERAGE_COLUMNS`; over all ranks."""


State = Callable[[], tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]]
"""Makes copies of masters and moments, see `Learner.state`."""


class Damaged(Exception):
    """This checkpoint cannot be used; an older one may."""


@dataclass(frozen=True)
class CheckpointFolder:
    """The checkpoints of one run on the local disk."""

    path: Path
    identity: Mapping[str, str] = field(default_factory=dict)
    keep: int = 2

    def save(self, snapshot: Snapshot, metrics: Path, metrics_bytes: int) -> Path:
        """Write a checkpoint with the first `metrics_bytes` of the metrics, point to it, and remove what need not stay.

        Raises:
            StorageError: the disk is full or not writable; earlier checkpoints are untouched.
        """
        step = snapshot.progress.step
        aside, final = self.path / f".saving-{step:08d}", self.folder(step)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            for left in self.path.glob(".saving-*"):
                shutil.rmtree(left)
            aside.mkdir()
            self._write(snapshot, aside, metrics, metrics_bytes)
            place(aside, final)
            self._point(snapshot.progress)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(aside, ignore_errors=True)
            raise StorageError(
                f"cannot write the checkpoint of step {step} to {self.path}: {error}; free disk space (or set "
                "storage.work_dir) and run the same command again: it continues from the checkpoint before"
            ) from None
        return final

    def _write(self, snapshot: Snapshot, folder: Path, metrics: Path, metrics_bytes: int) -> None:
        parts = {"masters": snapshot.masters, "moments": snapshot.moments, "coverage": {"coverage": snapshot.coverage}}
        for kind, tensors in parts.items():
            contiguous = {name: tensors[name].detach().contiguous() for name in sorted(tensors)}
            save_tensors(folder, contiguous, f"{kind}{{suffix}}.safetensors", PART_BYTES)
        with metrics.open("rb") as lines:
            (folder / METRICS_FILE).write_bytes(lines.read(metrics_bytes))
        state = {
            "format": FORMAT,
            "identity": dict(self.identity),
            "progress": asdict(snapshot.progress),
            "sha256": {file.name: sha256_file(file) for file in sorted(folder.iterdir())},
        }
        (folder / STATE_FILE).write_text(json.dumps(state, indent=1), encoding="utf8")

    def _point(self, progress: Progress) -> None:
        lost = self.pointer_is_damaged
        newest = {"step": progress.step, "sha256": self._state_sha256(progress.step)}
        entries = [*(entry for entry in self.entries() if entry["step"] < progress.step), newest]
        best = [entry for entry in entries[: -self.keep] if entry["step"] == progress.best_step]
        kept = entries if lost else [*best, *entries[-self.keep :]]
        write_whole(self.path / POINTER_FILE, json.dumps({"checkpoints": kept}, indent=1))
        if lost:
            return  # which of them are good is not known: the next checkpoint's pointer decides
        names = {self.folder(entry["step"]).name for entry in kept}
        for folder in self.path.iterdir():
            if folder.is_dir() and folder.name not in names:
                shutil.rmtree(folder, ignore_errors=True)

    def folder(self, step: int) -> Path:
        """The place of a step's checkpoint."""
        return self.path / f"{step:08d}"

    def entries(self) -> list[dict[str, Any]]:
        """What the pointer names, oldest first; where it cannot be read, every folder that was renamed into place."""
        pointed = self._pointed()
        if pointed is not None:
            return pointed
        steps = sorted(int(f.parent.name) for f in self.path.glob(f"*/{STATE_FILE}") if f.parent.name.isdigit())
        return [{"step": step, "sha256": self._state_sha256(step)} for step in steps]

    @property
    def pointer_is_damaged(self) -> bool:
        """Whether there is a pointer that cannot be read."""
        return self._pointed() is None

    def _pointed(self) -> list[dict[str, Any]] | None:
        try:
            table = json.loads((self.path / POINTER_FILE).read_text(encoding="utf8"))
            return [{"step": int(e["step"]), "sha256": str(e["sha256"])} for e in table["checkpoints"]]
        except FileNotFoundError:
            return []
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _state_sha256(self, step: int) -> str:
        return sha256_file(self.folder(step) / STATE_FILE)

    def load(self, step: int, sha256: str | None) -> Snapshot:
        """Read one checkpoint after checking every byte of it and what it belongs to.

        Args:
            step: which.
            sha256: of its state.json, from the pointer or manifest that names it.

        Raises:
            Damaged: a file is missing, cut or altered.
            IncompatibleError: it belongs to another run.
        """
        folder = self.folder(step)
        state = self._state(folder, sha256)
        for key in sorted({*self.identity, *state["identity"]}):
            ours, theirs = self.identity.get(key, UNSET), state["identity"].get(key, UNSET)
            if ours != theirs:
                raise IncompatibleError(
                    f"the checkpoint {folder} was made with {key} = {theirs}, this run has {key} = {ours}; restore the "
                    "former, or give the recipe another name to start from the beginning"
                )
        tensors: dict[str, dict[str, torch.Tensor]] = {"masters": {}, "moments": {}, "coverage": {}}
        try:
            for name, digest in state["sha256"].items():
                if sha256_file(folder / name) != digest:
                    raise Damaged(f"{folder / name} is altered or cut")
                if name.endswith(".safetensors"):
                    tensors[name.split(".")[0].split("-")[0]].update(load_file(folder / name))
            progress = Progress(**state["progress"])
            return Snapshot(progress, tensors["masters"], tensors["moments"], tensors["coverage"]["coverage"])
        except (OSError, SafetensorError, KeyError, TypeError) as error:
            raise Damaged(f"{folder}: {error!r}") from None

    def _state(self, folder: Path, sha256: str | None) -> dict[str, Any]:
        try:
            if sha256 is not None and sha256_file(folder / STATE_FILE) != sha256:
                raise Damaged(f"{folder / STATE_FILE} is altered or cut")
            state = json.loads((folder / STATE_FILE).read_text(encoding="utf8"))
            if state["format"] != FORMAT:
                raise IncompatibleError(
                    f"the checkpoint {folder} has format {state['format']}, this version reads {FORMAT}; use the "
                    "version that wrote it, or give the recipe another name"
                )
            return {key: dict(state[key]) for key in ("identity", "progress", "sha256")}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise Damaged(f"{folder}: {error!r}") from None


@dataclass(frozen=True)
class StoredCheckpoints:
    """The checkpoints of one run in the object store."""

    store: Store
    keys: RunKeys

    def saved(self) -> list[SavedStep]:
        """What can be resumed from, oldest first."""
        below = self.keys.checkpoints
        names = [listed.key for listed in self.store.list(below) if "/" not in listed.key.removeprefix(below)]
        found = (self.store.find_record(name, SavedStep) for name in names)
        return sorted((record for record in found if record is not None), key=lambda record: record.step)

    def upload(self, folder: Path, progress: Progress, keep: int) -> None:
        """Store a checkpoint folder, then its manifest, then remove all but the last `keep` and the best."""
        step = progress.step
        files = [
            self.store.upload(self.keys.checkpoint_file(step, file.name), file) for file in sorted(folder.iterdir())
        ]
        self.store.put_record(self.keys.saved_step(step), SavedStep(run=self.keys.run, step=step, files=tuple(files)))
        for old in [saved for saved in self.saved() if saved.step < step][: -keep + 1 or None]:
            if old.step != progress.best_step:
                self._remove(old)

    def download(self, saved: SavedStep, folder: Path) -> None:
        """Bring a checkpoint to `folder`, which appears only when every file is right."""
        aside = folder.with_name(f".fetching-{folder.name}")
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        for stored in saved.files:
            self.store.download(stored, aside / Path(stored.key).name)
        place(aside, folder)

    def clear(self) -> None:
        """Remove everything; the run is finished."""
        for saved in self.saved():
            self._remove(saved)
        for listed in list(self.store.list(self.keys.checkpoints)):
            self.store.delete(listed.key)

    def _remove(self, saved: SavedStep) -> None:
        self.store.delete(self.keys.saved_step(saved.step))  # first: it names the others
        for stored in saved.files:
            self.store.delete(stored.key)


def state_file(saved: SavedStep) -> StoredObject:
    """The object that says what a stored checkpoint was made from."""
    return next(file for file in saved.files if file.key.endswith(f"/{STATE_FILE}"))


class RunRecorder:
    """What the lead rank keeps of a run: metrics as JSON lines, checkpoints on this disk and in the store."""

    def __init__(
        self, folder: CheckpointFolder, stored: StoredCheckpoints, metrics: Path, steps_done: int, on_step: OnStep
    ) -> None:
        self._folder = folder
        self._stored = stored
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
            self._stored.upload(folder, snapshot.progress, self._folder.keep)
        except StorageError as error:
            log.warning("the checkpoint of step %d is on this disk only: %s", snapshot.progress.step, error)


def resume(folder: CheckpointFolder, stored: StoredCheckpoints, metrics: Path) -> Snapshot | None:
    """The newest usable checkpoint of this disk or the store, and its metrics file put in place; None: there is none.

    Raises:
        IncompatibleError: the newest one belongs to something else.
    """
    if folder.pointer_is_damaged:
        log.warning("%s cannot be read; every checkpoint next to it is tried, newest first", folder.path / POINTER_FILE)
    candidates = _candidates(folder, stored)
    for candidate in candidates:
        snapshot = _usable(folder, stored, candidate, "trying the one before")
        if snapshot is not None:
            step = snapshot.progress.step
            metrics.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(folder.folder(step) / METRICS_FILE, metrics)
            log.info("continuing from the checkpoint of step %d", step)
            return snapshot
    if candidates:
        log.warning("none of %d checkpoints can be used; training starts from the beginning", len(candidates))
    return None


def saved_at(folder: CheckpointFolder, stored: StoredCheckpoints, step: int) -> Snapshot | None:
    """The checkpoint of one step, from this disk or the store; None where neither has it whole."""
    for candidate in _candidates(folder, stored):
        if candidate.step == step:
            snapshot = _usable(folder, stored, candidate, "looking elsewhere")
            if snapshot is not None:
                return snapshot
    return None


def require_tensors(
    snapshot: Snapshot, masters: Mapping[str, torch.Tensor], moments: Mapping[str, torch.Tensor]
) -> None:
    """Refuse a snapshot that lacks a tensor, has one too many, or one of another shape: no optimizer state is invented.

    Raises:
        IncompatibleError: naming the tensor.
    """
    for kind, ours, theirs in (("weight", masters, snapshot.masters), ("optimizer state", moments, snapshot.moments)):
        for name in sorted({*ours, *theirs}):
            shapes = [None if name not in side else tuple(side[name].shape) for side in (ours, theirs)]
            if shapes[0] != shapes[1]:
                raise IncompatibleError(
                    f"the checkpoint's {kind} {name} has shape {shapes[1]}, this run's {shapes[0]} (None: absent); "
                    "restore the checkpoint or give the recipe another name to start from the beginning"
                )


class _Candidate(NamedTuple):
    step: int
    sha256: str
    saved: SavedStep | None
    """None: on this disk."""


def _candidates(folder: CheckpointFolder, stored: StoredCheckpoints) -> list[_Candidate]:
    """Newest first, and of one step this disk's before the store's."""
    local = [_Candidate(entry["step"], entry["sha256"], None) for entry in folder.entries()]
    remote = [_Candidate(saved.step, state_file(saved).sha256, saved) for saved in stored.saved()]
    return sorted([*remote, *local], key=lambda c: (c.step, c.saved is None), reverse=True)


def _usable(
    folder: CheckpointFolder, stored: StoredCheckpoints, candidate: _Candidate, otherwise: str
) -> Snapshot | None:
    try:
        if candidate.saved is not None:
            stored.download(candidate.saved, folder.folder(candidate.step))
        return folder.load(candidate.step, candidate.sha256)
    except (Damaged, ObjectCorrupt, ObjectMissing) as error:
        log.warning("the checkpoint of step %d cannot be used (%s); %s", candidate.step, error, otherwise)
        return None
