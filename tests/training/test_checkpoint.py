"""Checkpoints: whole or not there, and never somebody else's."""

import json
import math
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_core.errors import IncompatibleError, StorageError
from dflash_core.local_files import sha256_file
from dflash_core.storage.layout import METRICS_FILE, RunKeys
from dflash_core.storage.s3 import Store
from dflash_core.training import checkpoint as module
from dflash_core.training.checkpoint import (
    POINTER_FILE,
    STATE_FILE,
    CheckpointFolder,
    Damaged,
    Progress,
    Snapshot,
    StoredCheckpoints,
    require_tensors,
    resume,
)

IDENTITY = {"training_set": "abc", "target and tokenizer": "def", "drafters (ranks)": "1"}


def snapshot(step: int) -> Snapshot:
    generator = torch.Generator().manual_seed(step)
    masters = {name: torch.randn(4, 3, generator=generator) for name in ("fc.weight", "norm.weight")}
    moments = {f"{kind}.{name}": torch.randn(4, 3, generator=generator) for kind in ("exp_avg",) for name in masters}
    return Snapshot(Progress(step=step, train_s=0.1 * step), masters, moments, torch.rand(2, 6, dtype=torch.float64))


def folder_with(tmp_path: Path, *steps: int, keep: int = 2) -> tuple[CheckpointFolder, list[Snapshot]]:
    metrics = tmp_path / METRICS_FILE
    metrics.write_text("one\ntwo\nthree\n")
    folder = CheckpointFolder(tmp_path / "checkpoints", IDENTITY, keep)
    saved = [snapshot(step) for step in steps]
    for each in saved:
        folder.save(each, metrics, len("one\ntwo\n"))
    return folder, saved


def newest(folder: CheckpointFolder) -> Snapshot:
    entry = folder.entries()[-1]
    return folder.load(entry["step"], entry["sha256"])


def same(a: Snapshot, b: Snapshot) -> bool:
    tensors = [(a.masters, b.masters), (a.moments, b.moments), ({"c": a.coverage}, {"c": b.coverage})]
    return a.progress == b.progress and all(
        x.keys() == y.keys() and all(torch.equal(x[k], y[k]) for k in x) for x, y in tensors
    )


def test_what_was_saved_is_loaded_and_only_the_last_are_kept(tmp_path: Path) -> None:
    folder, saved = folder_with(tmp_path, 2, 4, 6)
    assert [entry["step"] for entry in folder.entries()] == [4, 6]
    assert same(newest(folder), saved[-1])
    assert sorted(p.name for p in folder.path.iterdir()) == ["00000004", "00000006", POINTER_FILE]
    assert (folder.folder(6) / METRICS_FILE).read_text() == "one\ntwo\n"


def measured(step: int, prefix: float, loss: float = 1.0, validated: int | None = None) -> Progress:
    """The progress of a run whose held-out rows were validated after step `validated`."""
    at = step if validated is None else validated
    return Progress(step=step, held_out_accepted_prefix=prefix, held_out_loss=loss, validated_step=at)


def test_the_best_is_kept_besides_the_last(tmp_path: Path) -> None:
    folder, _ = folder_with(tmp_path)
    best = Progress()
    for step, prefix in ((1, 1.5), (2, 3.0), (3, 2.0), (4, 2.5), (5, 2.9)):
        best = replace(
            measured(step, prefix), best_step=best.best_step, best_accepted_prefix=best.best_accepted_prefix
        ).with_best()
        folder.save(replace(snapshot(step), progress=best), tmp_path / METRICS_FILE, 4)
    assert [entry["step"] for entry in folder.entries()] == [2, 4, 5]
    assert sorted(p.name for p in folder.path.glob("0*")) == ["00000002", "00000004", "00000005"]
    assert newest(folder).progress.best_step == 2


@pytest.mark.parametrize(
    ("progress", "best"),
    [
        (measured(4, 3.1), 4),
        (measured(4, 3.0, loss=0.9), 4),  # equal prefix, lower loss
        (measured(4, 3.0), 2),  # a tie: the earlier stays
        (measured(4, 3.1, validated=3), 2),  # measured on other weights
        (measured(4, float("nan")), 2),
        (measured(4, 3.1, loss=float("nan")), 2),
        (measured(4, float("inf")), 2),
    ],
)
def test_what_becomes_the_best(progress: Progress, best: int) -> None:
    before = {"best_step": 2, "best_accepted_prefix": 3.0, "best_loss": 1.0}
    assert replace(progress, **before).with_best().best_step == best  # type: ignore[arg-type]
    first = progress.with_best()
    assert first.best_step == (4 if progress.validated_step == 4 and math.isfinite(sum(score(progress))) else 0)


def score(progress: Progress) -> tuple[float, float]:
    return progress.held_out_accepted_prefix, progress.held_out_loss


def test_large_states_are_split_into_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PART_BYTES", 50)
    folder, saved = folder_with(tmp_path, 1)
    assert len(list(folder.folder(1).glob("masters-*"))) == 2
    assert same(newest(folder), saved[0])


def flip(path: Path) -> None:
    body = bytearray(path.read_bytes())
    body[len(body) // 2] ^= 1
    path.write_bytes(body)


@pytest.mark.parametrize(
    "damage",
    [flip, lambda path: path.unlink(), lambda path: path.write_bytes(path.read_bytes()[:-4])],
    ids=["flipped", "missing", "cut"],
)
@pytest.mark.parametrize("name", ["masters.safetensors", "moments.safetensors", METRICS_FILE, STATE_FILE])
def test_a_damaged_file_is_noticed_and_the_one_before_is_good(
    tmp_path: Path, name: str, damage: Callable[[Path], None]
) -> None:
    folder, saved = folder_with(tmp_path, 2, 4)
    damage(folder.folder(4) / name)
    with pytest.raises(Damaged):
        newest(folder)
    before = folder.entries()[0]
    assert same(folder.load(before["step"], before["sha256"]), saved[0])


def test_a_number_of_the_state_that_became_another_is_noticed(tmp_path: Path) -> None:
    folder, _ = folder_with(tmp_path, 2)
    state = folder.folder(2) / STATE_FILE
    table = json.loads(state.read_text())
    table["progress"]["rows"] += 1
    state.write_text(json.dumps(table, indent=1))
    with pytest.raises(Damaged, match=STATE_FILE):
        newest(folder)


def test_a_damaged_pointer_costs_no_checkpoint(tmp_path: Path) -> None:
    """All are offered, and none goes before a new pointer says which are needed."""
    folder, saved = folder_with(tmp_path, 2, 4, 6, keep=3)
    pointer, told = folder.path / POINTER_FILE, folder.entries()
    for damage in ('{"checkpoints": [{"st', "[]", '{"checkpoints": [{"step": 6}]}'):
        pointer.write_text(damage)
        assert folder.pointer_is_damaged
        assert folder.entries() == told
        assert same(newest(folder), saved[-1])
    shrunk = replace(folder, keep=1)
    shrunk.save(snapshot(8), tmp_path / METRICS_FILE, 4)
    assert not shrunk.pointer_is_damaged
    assert [entry["step"] for entry in shrunk.entries()] == [2, 4, 6, 8]
    assert newest(shrunk).progress.step == 8
    assert len(list(folder.path.glob("0*"))) == 4
    shrunk.save(snapshot(10), tmp_path / METRICS_FILE, 4)
    assert [p.name for p in folder.path.glob("0*")] == ["00000010"]


def test_where_no_pointer_was_written_there_is_no_checkpoint(tmp_path: Path) -> None:
    """A kill between the first folder and its pointer."""
    folder, _ = folder_with(tmp_path, 2)
    (folder.path / POINTER_FILE).unlink()
    assert folder.entries() == []
    assert not folder.pointer_is_damaged


@pytest.mark.parametrize("key", list(IDENTITY))
def test_another_runs_checkpoint_is_refused_with_the_field(tmp_path: Path, key: str) -> None:
    folder, _ = folder_with(tmp_path, 2)
    other = CheckpointFolder(folder.path, {**IDENTITY, key: "xyz"}, 2)
    entry = other.entries()[-1]
    with pytest.raises(IncompatibleError) as refusal:
        other.load(entry["step"], entry["sha256"])
    assert f"{key} = {IDENTITY[key]}" in str(refusal.value)
    assert f"{key} = xyz" in str(refusal.value)


def test_a_missing_optimizer_state_is_refused_not_invented(tmp_path: Path) -> None:
    """Even where somebody has made all hashes right again."""
    folder, (saved,) = folder_with(tmp_path, 2)
    file, state = folder.folder(2) / "moments.safetensors", folder.folder(2) / STATE_FILE
    moments = load_file(file)
    del moments["exp_avg.fc.weight"]
    save_file(moments, file)
    table = json.loads(state.read_text())
    table["sha256"][file.name] = sha256_file(file)
    state.write_text(json.dumps(table))
    with pytest.raises(IncompatibleError, match=r"optimizer state exp_avg\.fc\.weight"):
        require_tensors(folder.load(2, None), saved.masters, saved.moments)


def test_another_shape_is_refused(tmp_path: Path) -> None:
    folder, (saved,) = folder_with(tmp_path, 2)
    with pytest.raises(IncompatibleError, match=r"weight fc\.weight has shape \(4, 3\), this run's \(4, 5\)"):
        require_tensors(newest(folder), {**saved.masters, "fc.weight": torch.zeros(4, 5)}, saved.moments)


def test_files_are_synced_before_the_rename_and_the_folder_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    sync, rename, replace = os.fsync, os.rename, os.replace

    def fsync(handle: int) -> None:
        done.append(f"sync {Path(os.readlink(f'/proc/self/fd/{handle}')).name}")
        sync(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", lambda a, b: (done.append("rename"), rename(a, b)))
    monkeypatch.setattr(os, "replace", lambda a, b: (done.append(f"replace {Path(a).name}"), replace(a, b)))
    folder, _ = folder_with(tmp_path, 2)
    renamed = done.index("rename")
    (pointed,) = (i for i, call in enumerate(done) if call.startswith("replace"))
    files = {p.name for p in folder.folder(2).iterdir()}
    assert {f"sync {name}" for name in (*files, ".saving-00000002")} <= set(done[:renamed])
    assert done[renamed + 1] == "sync checkpoints"
    assert done[pointed].startswith(f"replace .{POINTER_FILE}")
    assert done[pointed].replace("replace", "sync") in done[renamed:pointed]
    assert done[pointed + 1] == "sync checkpoints"


STRACED = """
import torch
from pathlib import Path
from dflash_core.training.checkpoint import CheckpointFolder, Progress, Snapshot
folder = Path({folder!r})
(folder / "metrics.jsonl").write_text("one")
tensors = {{"fc.weight": torch.ones(3)}}, {{"exp_avg.fc.weight": torch.ones(3)}}
saved = Snapshot(Progress(step=2), *tensors, torch.zeros(1, 6))
CheckpointFolder(folder / "checkpoints").save(saved, folder / "metrics.jsonl", 3)
"""


@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace (Debian's)")
def test_the_kernel_sees_files_synced_then_the_rename_then_the_folder_synced(tmp_path: Path) -> None:
    """What a power loss leaves depends on this order alone, so it is read from the system calls themselves."""
    log = tmp_path / "calls"
    command = ["strace", "-f", "-y", "-o", str(log), "-e", "trace=fsync,rename,renameat,renameat2", sys.executable]
    traced = subprocess.run(
        [*command, "-c", STRACED.format(folder=str(tmp_path))], capture_output=True, text=True, check=False
    )
    if traced.returncode and "ptrace" in traced.stderr:
        pytest.skip("this machine lets nobody trace a process")
    assert traced.returncode == 0, traced.stderr
    calls = [line for line in log.read_text().splitlines() if str(tmp_path / "checkpoints") in line]
    synced = [re.findall(r"fsync\(\d+<(.*?)>", line) for line in calls]
    renamed = next(i for i, line in enumerate(calls) if re.search(r'rename.*\.saving-\d+"', line))
    pointed = next(i for i, line in enumerate(calls) if "rename" in line and POINTER_FILE in line)
    before = {Path(names[0]).name for names in synced[:renamed] if names}
    assert {"masters.safetensors", "moments.safetensors", METRICS_FILE, STATE_FILE, ".saving-00000002"} <= before
    assert synced[renamed + 1] == [str(tmp_path / "checkpoints")]
    assert any(names and Path(names[0]).name.startswith(f".{POINTER_FILE}") for names in synced[renamed:pointed])
    assert synced[pointed + 1] == [str(tmp_path / "checkpoints")]


def test_a_full_disk_leaves_the_old_checkpoint_and_says_so(tmp_path: Path) -> None:
    folder, saved = folder_with(tmp_path, 2)
    large = Snapshot(Progress(step=4), {"fc.weight": torch.zeros(300, 300)}, {}, torch.zeros(2, 6))
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limit[1]))
    try:
        with pytest.raises(StorageError, match=r"cannot write the checkpoint of step 4.*free disk space"):
            folder.save(large, tmp_path / METRICS_FILE, 4)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert same(newest(folder), saved[0])
    assert not list(folder.path.glob(".saving-*"))


def test_foreign_leftovers_of_a_crash_are_cleared(tmp_path: Path) -> None:
    folder, _ = folder_with(tmp_path, 2)
    shutil.copytree(folder.folder(2), folder.path / ".saving-00000009")
    folder.save(snapshot(4), tmp_path / METRICS_FILE, 4)
    assert not list(folder.path.glob(".saving-*"))


def test_what_a_kill_within_the_replacement_of_a_checkpoint_left_is_no_hindrance(tmp_path: Path) -> None:
    """A checkpoint that no pointer names yet is written again, and for the second time a kill comes in between."""
    folder, _ = folder_with(tmp_path, 2, 4)
    shutil.copytree(folder.folder(4), folder.path / ".00000004.old")
    again = snapshot(4)
    folder.save(again, tmp_path / METRICS_FILE, 4)
    assert same(newest(folder), again)
    assert sorted(p.name for p in folder.path.iterdir()) == ["00000002", "00000004", POINTER_FILE]


def as_earlier_versions_wrote_it(folder: CheckpointFolder, saved: Snapshot, metrics: str) -> None:
    """A checkpoint whose files are numbered from 000, split or not, by the name of each tensor."""
    place = folder.folder(saved.progress.step)
    place.mkdir(parents=True)
    save_file({"fc.weight": saved.masters["fc.weight"]}, place / "masters-000.safetensors")
    save_file({"norm.weight": saved.masters["norm.weight"]}, place / "masters-001.safetensors")
    save_file(saved.moments, place / "moments-000.safetensors")
    save_file({"coverage": saved.coverage}, place / "coverage.safetensors")
    (place / METRICS_FILE).write_text(metrics)
    state = {
        "format": 1,
        "identity": dict(folder.identity),
        "progress": asdict(saved.progress),
        "sha256": {file.name: sha256_file(file) for file in sorted(place.iterdir())},
    }
    (place / STATE_FILE).write_text(json.dumps(state, indent=1))
    entry = {"step": saved.progress.step, "sha256": sha256_file(place / STATE_FILE)}
    (folder.path / POINTER_FILE).write_text(json.dumps({"checkpoints": [entry]}, indent=1))


@pytest.mark.parametrize("where", ["disk", "store"])
def test_a_checkpoint_with_the_file_names_of_earlier_versions_is_continued(
    where: str, s3: Store, tmp_path: Path
) -> None:
    folder, saved = CheckpointFolder(tmp_path / "checkpoints", IDENTITY), snapshot(3)
    stored = StoredCheckpoints(s3, RunKeys("tiny-0123456789ab"))
    as_earlier_versions_wrote_it(folder, saved, "one\ntwo\nthree\n")
    if where == "store":
        stored.upload(folder.folder(3), saved.progress, folder.keep)
        shutil.rmtree(folder.path)
    metrics = tmp_path / METRICS_FILE
    found = resume(folder, stored, metrics)
    assert found is not None
    assert same(found, saved)
    assert metrics.read_text() == "one\ntwo\nthree\n"
    require_tensors(found, saved.masters, saved.moments)
    later = snapshot(4)
    folder.save(later, metrics, 4)
    assert same(newest(folder), later)
