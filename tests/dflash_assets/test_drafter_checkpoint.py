"""A drafter is trained on the files that are good, and every one of them gets its page, on any instance."""

from collections.abc import Callable, Sequence
from pathlib import Path

import dagster as dg
import pytest

from dflash_assets import children
from dflash_assets.drafter_checkpoint import drafter_checkpoint
from dflash_assets.resources import RecipeResource
from dflash_assets.training_set import training_set
from dflash_core.drafter.runs import find_checkpoint
from dflash_core.records import DrafterCheckpoint, SourceFile
from dflash_core.storage.s3 import Store
from dflash_core.workspace import Workspace

Materialize = Callable[[Sequence[str]], dg.ExecuteInProcessResult]
Sync = Callable[[], tuple[SourceFile, ...]]
Rows = Callable[..., bytes]
Train = Callable[[dg.DagsterInstance], DrafterCheckpoint]
FILES, BAD = 100, {"part-017", "part-018", "part-063"}


@pytest.fixture
def train(workspace: Workspace, recipe_file: Path, resources: dict[str, RecipeResource]) -> Train:
    """Freeze what is good and train on it, each in a run of its own."""
    with recipe_file.open("a") as file:
        file.write(
            "num_layers = 1\n[gate]\nmin_coverage = 0.95\n[training]\nepochs = 1\nbatch_rows = 64\nanchors = 4\n"
        )

    def run(instance: dg.DagsterInstance) -> DrafterCheckpoint:
        for asset in (training_set, drafter_checkpoint):
            assert dg.materialize([asset], instance=instance, resources=resources).success
        return find_checkpoint(workspace.derived, None)

    return run


def pages(instance: dg.DagsterInstance) -> set[str]:
    """Partitions of drafter_coverage that have one."""
    return set(instance.get_materialized_partitions(dg.AssetKey("drafter_coverage")))


def test_of_a_hundred_files_97_are_trained_on_and_each_has_its_page(
    instance: dg.DagsterInstance,
    source: Store,
    materialize: Materialize,
    sync: Sync,
    rows: Rows,
    train: Train,
    stale: Callable[[str, str | None], list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = [f"part-{number:03d}" for number in range(FILES)]
    for name in names:
        source.put(f"{name}.jsonl", b"" if name in BAD else rows(3, name))
    sync()
    assert not materialize(names).success
    checkpoint = train(instance)
    good = set(names) - BAD
    assert checkpoint.gate == "passed"
    assert {file.partition for file in checkpoint.coverage} == pages(instance) == good
    assert sum(file.rows > 0 for file in checkpoint.coverage) > 90, "all but the held-out rows were trained on"
    for asset, partition in (("training_set", None), ("drafter_checkpoint", None), ("drafter_coverage", "part-000")):
        assert stale(asset, partition) == []

    monkeypatch.setattr(children, "train", lambda *arguments: checkpoint)
    with dg.instance_for_test() as fresh:
        train(fresh)
        assert pages(fresh) == good, "an instance that has never seen the files"
