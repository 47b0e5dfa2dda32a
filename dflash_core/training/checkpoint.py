"""Checkpoints that survive a crash at any instant: safetensors and JSON, hashed, renamed, named by a pointer last.

    <folder>/00000200/{masters,moments}-000.safetensors ... coverage.safetensors metrics.jsonl state.json
    <folder>/latest.json       {"checkpoints": [{"step": 200, "sha256": "<of state.json>"}, ...]}, newest last

The last `keep` are kept, and the best.

`state.json` holds the sha256 of every other file. Each file is written aside and fsynced, the folder is renamed, its
parent fsynced, and only then the pointer replaced. A checkpoint belongs to one run; what it was made from (`identity`)
is compared field by field before anything is loaded. The trade-off: each save writes everything anew, 12 bytes a
parameter.
"""

import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from dflash_core.drafter.folder import sync
from dflash_core.errors import IncompatibleError, StorageError
from dflash_core.storage.transfers import sha256_file

FORMAT = 1
POINTER = "latest.json"
STATE = "state.json"
METRICS = "metrics.jsonl"
PART_BYTES = 1 << 30
"""Tensors are grouped into files of about this size, small enough for one PUT."""


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
            _remove_aside(self.path)
            aside.mkdir()
            for name, tensors in _parts(snapshot):
                save_file(tensors, aside / name)
            with metrics.open("rb") as lines:
                (aside / METRICS).write_bytes(lines.read(metrics_bytes))
            digests = {}
            for file in sorted(aside.iterdir()):
                sync(file)
                digests[file.name] = sha256_file(file)
            state = {
                "format": FORMAT,
                "identity": dict(self.identity),
                "progress": asdict(snapshot.progress),
                "sha256": digests,
            }
            (aside / STATE).write_text(json.dumps(state, indent=1), encoding="utf8")
            sync(aside / STATE)
            sync(aside)
            shutil.rmtree(final, ignore_errors=True)
            os.rename(aside, final)
            sync(self.path)
            self._point(snapshot.progress)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(aside, ignore_errors=True)
            raise StorageError(
                f"cannot write the checkpoint of step {step} to {self.path}: {error}; free disk space (or set "
                "storage.work_dir) and run the same command again: it continues from the checkpoint before"
            ) from None
        return final

    def _point(self, progress: Progress) -> None:
        lost = self.pointer_is_damaged
        newest = {"step": progress.step, "sha256": self._state_sha256(progress.step)}
        entries = [*(entry for entry in self.entries() if entry["step"] < progress.step), newest]
        best = [entry for entry in entries[: -self.keep] if entry["step"] == progress.best_step]
        kept = entries if lost else [*best, *entries[-self.keep :]]
        aside = self.path / f".{POINTER}"
        aside.write_text(json.dumps({"checkpoints": kept}, indent=1), encoding="utf8")
        sync(aside)
        os.replace(aside, self.path / POINTER)
        sync(self.path)
        if lost:
            return  # which of them are good is not known: the next checkpoint's pointer decides
        names = {self.folder(entry["step"]).name for entry in kept}
        for folder in self.path.iterdir():
            if folder.is_dir() and folder.name not in names:
                shutil.rmtree(folder, ignore_errors=True)

    def folder(self, step: int) -> Path:
        """Where the checkpoint of a step lies."""
        return self.path / f"{step:08d}"

    def entries(self) -> list[dict[str, Any]]:
        """What the pointer names, oldest first; where it cannot be read, every folder that was renamed into place."""
        pointed = self._pointed()
        if pointed is not None:
            return pointed
        steps = sorted(int(f.parent.name) for f in self.path.glob(f"*/{STATE}") if f.parent.name.isdigit())
        return [{"step": step, "sha256": self._state_sha256(step)} for step in steps]

    @property
    def pointer_is_damaged(self) -> bool:
        """Whether there is a pointer that cannot be read."""
        return self._pointed() is None

    def _pointed(self) -> list[dict[str, Any]] | None:
        try:
            table = json.loads((self.path / POINTER).read_text(encoding="utf8"))
            return [{"step": int(e["step"]), "sha256": str(e["sha256"])} for e in table["checkpoints"]]
        except FileNotFoundError:
            return []
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _state_sha256(self, step: int) -> str:
        return sha256_file(self.folder(step) / STATE)

    def load(self, step: int, sha256: str | None) -> Snapshot:
        """Read one checkpoint after checking every byte of it and what it belongs to.

        Args:
            step: which.
            sha256: of its state.json, from the pointer or manifest that names it.

        Raises:
            Damaged: a file is missing, cut or altered.
            IncompatibleError: it belongs to another run, or holds other tensors than `like`.
        """
        folder = self.folder(step)
        state = self._state(folder, sha256)
        for key in sorted({*self.identity, *state["identity"]}):
            ours, theirs = self.identity.get(key), state["identity"].get(key)
            if ours != theirs:
                raise IncompatibleError(
                    f"the checkpoint {folder} was made with {key} = {theirs}, this run has {key} = {ours}; restore the "
                    "former, or give the recipe another name to start anew"
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
            if sha256 is not None and sha256_file(folder / STATE) != sha256:
                raise Damaged(f"{folder / STATE} is altered or cut")
            state = json.loads((folder / STATE).read_text(encoding="utf8"))
            if state["format"] != FORMAT:
                raise IncompatibleError(
                    f"the checkpoint {folder} has format {state['format']}, this version reads {FORMAT}; use the "
                    "version that wrote it, or give the recipe another name"
                )
            return {key: dict(state[key]) for key in ("identity", "progress", "sha256")}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise Damaged(f"{folder}: {error!r}") from None


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
                    "restore the checkpoint or give the recipe another name to start anew"
                )


def _parts(snapshot: Snapshot) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    for kind, tensors in (("masters", snapshot.masters), ("moments", snapshot.moments)):
        group: dict[str, torch.Tensor] = {}
        number = size = 0
        for name in sorted(tensors):
            if group and size + tensors[name].nbytes > PART_BYTES:
                yield f"{kind}-{number:03d}.safetensors", group
                group, size, number = {}, 0, number + 1
            group[name] = tensors[name].detach().contiguous()
            size += tensors[name].nbytes
        yield f"{kind}-{number:03d}.safetensors", group
    yield "coverage.safetensors", {"coverage": snapshot.coverage.contiguous()}


def _remove_aside(path: Path) -> None:
    for left in path.glob(".saving-*"):
        shutil.rmtree(left)
