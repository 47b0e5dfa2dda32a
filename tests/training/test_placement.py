"""Who runs what: pairs, several targets for one drafter, one device; and the same update from each of them."""

import shutil
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import distributed

from dflash_core.errors import RecipeError, UserError
from dflash_core.recipe import PlacementSettings, Recipe
from dflash_core.storage.s3 import Store
from dflash_core.target.files import load_head
from dflash_core.target.hooked import load_target
from dflash_core.training import placement as placement_module
from dflash_core.training.features import FeatureFeed, prepare
from dflash_core.training.job import Job, Rank
from dflash_core.training.placement import RankPlacement, join, place, step_group
from dflash_core.training.train import train
from dflash_core.workspace import connect
from tests.training.conftest import put_training_set, random_rows, row_store
from tests.training.ranks import run_ranks
from tests.training.test_step import CONFIG, CPU, PREPARATION, Loader, StepShape, make_learner, weights


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)


def devices(targets: list[str], drafters: list[str]) -> list[tuple[str, list[str], int]]:
    placement = PlacementSettings(targets=tuple(targets), drafters=tuple(drafters))
    ranks = [place(placement, Rank(rank, len(drafters))) for rank in range(len(drafters))]
    assert [r.lead for r in ranks] == [True] + [False] * (len(drafters) - 1)
    return [(str(r.drafter), [str(t) for t in r.targets], r.buffers_per_target) for r in ranks]


@pytest.mark.usefixtures("four_gpus")
def test_pairs_as_asked_for() -> None:
    """Two targets on 0 and 1, drafters on 2 and 3: two concurrent streams."""
    assert devices(["cuda:0", "cuda:1"], ["cuda:2", "cuda:3"]) == [
        ("cuda:2", ["cuda:0"], 2),
        ("cuda:3", ["cuda:1"], 2),
    ]


@pytest.mark.usefixtures("four_gpus")
def test_other_placements() -> None:
    assert devices(["cuda"], ["cuda:0"]) == [("cuda:0", ["cuda:0"], 1)]
    assert devices(["cuda:0", "cuda:1", "cuda:2"], ["cuda:3"]) == [("cuda:3", ["cuda:0", "cuda:1", "cuda:2"], 2)]
    assert devices(["cpu"] * 4, ["cpu"] * 2) == [("cpu", ["cpu", "cpu"], 1)] * 2
    shared = devices(["cuda:0", "cuda:1"], ["cuda:0", "cuda:1"])
    assert shared == [("cuda:0", ["cuda:0"], 1), ("cuda:1", ["cuda:1"], 1)]


@pytest.mark.usefixtures("four_gpus")
@pytest.mark.parametrize(
    ("targets", "drafters", "ranks", "reason"),
    [
        (["cuda:4"], ["cuda:0"], 1, r"cuda:4 does not exist here \(4 CUDA devices\)"),
        (["gpu"], ["cpu"], 1, "'gpu' is not a device"),
        (["cpu", "cpu"], ["cuda:0", "cuda:0"], 2, "as many different GPUs"),
        (["cpu", "cpu"], ["cuda:0", "cpu"], 2, "as many different GPUs"),
        (["cpu", "cpu"], ["cpu", "cpu"], 1, "2 drafters but 1 training processes"),
    ],
)
def test_impossible_placements_are_refused(targets: list[str], drafters: list[str], ranks: int, reason: str) -> None:
    with pytest.raises(RecipeError, match=reason):
        place(PlacementSettings(targets=tuple(targets), drafters=tuple(drafters)), Rank(0, ranks))


@pytest.mark.usefixtures("four_gpus")
def test_a_drafter_alone_is_on_the_current_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(Path, "is_file", lambda _: True)
    joined = join(PlacementSettings(targets=("cuda:0",), drafters=("cuda:3",)), Rank())
    assert (joined.rank, joined.ranks) == (0, 1)
    assert current == [torch.device("cuda", 3)]


@pytest.mark.usefixtures("four_gpus")
@pytest.mark.parametrize(("lacking", "named"), [("gcc clang", "a C compiler"), ("Python.h", "Python.h")])
def test_a_gpu_without_what_compiles_its_kernels_is_refused_at_once(
    lacking: str, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None if name in lacking else f"/usr/bin/{name}")
    monkeypatch.setattr(Path, "is_file", lambda path: path.name not in lacking)
    with pytest.raises(UserError, match=named):
        join(PlacementSettings(targets=("cuda:0",), drafters=("cuda:0",)), Rank())
    assert join(PlacementSettings(), Rank()) == RankPlacement(0, 1, CPU, (CPU,))  # a CPU compiles nothing


@pytest.mark.usefixtures("four_gpus")
@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_joins_on_the_gpu_of_its_drafter(rank: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Collectives of Python objects run on the current device: it must not be GPU 0 for everyone."""
    current: list[torch.device] = []
    joined: list[tuple[Any, ...]] = []

    def init(
        backend: str, *, init_method: str, rank: int, world_size: int, timeout: timedelta, device_id: torch.device
    ) -> None:
        assert timeout > timedelta(minutes=10)
        joined.append((backend, init_method, rank, world_size, device_id))

    monkeypatch.setattr(distributed, "init_process_group", init)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setattr(placement_module, "require_compiler", lambda: None)
    placement = PlacementSettings(targets=("cuda:0", "cuda:1"), drafters=("cuda:2", "cuda:3"))
    this, meeting = Rank(rank, 2, tmp_path / "rendezvous"), f"file://{tmp_path}/rendezvous"
    assert join(placement, this) == place(placement, this)
    assert current == [place(placement, this).drafter] == [torch.device("cuda", 2 + rank)]
    assert joined == [("nccl", meeting, rank, 2, current[0])]


def test_a_step_ends_for_those_who_wait_in_it(tmp_path: Path) -> None:
    placement = PlacementSettings(targets=("cpu",) * 2, drafters=("cpu",) * 2, timeout_s=2)
    told = tmp_path / "told"

    def work(rank: int) -> str:
        group = step_group(placement)
        if rank == 0:
            with pytest.raises(RuntimeError) as ended:
                distributed.all_reduce(torch.ones(1), group=group)
            told.touch()
            return str(ended.value)
        deadline = time.monotonic() + 60
        while not told.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        return "hung"

    assert run_ranks(2, work, tmp_path)[1] == "hung"
    assert told.exists()


@pytest.mark.parametrize(("backend", "longer"), [("gloo", False), ("nccl", True)])
def test_nccl_that_ends_a_process_without_a_word_is_given_longer_than_we_wait(
    backend: str, longer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[timedelta] = []
    monkeypatch.setattr(distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(distributed, "get_backend", lambda: backend)
    monkeypatch.setattr(distributed, "new_group", lambda *, timeout: given.append(timeout))
    step_group(PlacementSettings(timeout_s=20))
    assert (given[0] > timedelta(seconds=30)) == longer
    assert given[0] >= timedelta(seconds=20)


@pytest.mark.parametrize(("targets", "drafters"), [(1, 1), (3, 1), (2, 2), (4, 2)])
def test_m_targets_feeding_n_drafters_give_one_update(
    target_folder: Path, tmp_path: Path, targets: int, drafters: int
) -> None:
    """In float64, one process a drafter, against one target feeding one drafter in one process."""
    rows = row_store({"a": random_rows(0, 12), "b": random_rows(1, 12)})
    head = load_head(target_folder, torch.float64, CPU)

    def trained(rank: int, placement: PlacementSettings) -> Any:
        here = place(placement, Rank(rank, len(placement.drafters)))
        copies = [load_target(target_folder, CONFIG.target_layer_ids, torch.float64, d) for d in here.targets]
        learner, used = make_learner(head), []
        for copy in copies:
            copy.backbone.register_forward_pre_hook(lambda module, _args: used.append(id(module)))
        shape = StepShape(4 // here.ranks, 2, here.rank, here.ranks)
        batches = Loader(rows, np.arange(len(rows)), 0, shape).batches(0, 4)
        feed = FeatureFeed(copies, here.drafter, here.buffers_per_target)
        for prepared, features in feed.feed(prepare(batch, PREPARATION) for batch in batches):
            if features is not None:
                learner.accumulate(prepared, features)
            if prepared.batch.last:
                learner.update(1e-2, stop=False)
        assert [id(c.backbone) for c in copies] == used[: len(copies)]  # in turn
        return weights(learner).numpy()

    alone = trained(0, PlacementSettings())
    placement = PlacementSettings(targets=("cpu",) * targets, drafters=("cpu",) * drafters)
    if drafters == 1:
        answers = [trained(0, placement)]
    else:
        answers = run_ranks(drafters, lambda rank: trained(rank, placement), tmp_path)
    for got in answers:
        assert np.abs(got - alone).max() < 1e-10


def test_the_recipe_alone_decides(make_recipe: Callable[..., Recipe], s3: Store) -> None:
    """Two targets in one process: bit for bit what one gives."""
    frozen = put_training_set(s3, {"file0": random_rows(0, 12)})
    one, two = (
        train(connect(recipe.model_copy(update={"name": name})), Job(frozen.hash), lambda _: None)
        for name, recipe in (
            ("one", make_recipe(max_steps=4)),
            ("two", make_recipe(max_steps=4, placement={"targets": ["cpu", "cpu"], "drafters": ["cpu"]})),
        )
    )
    assert one.weights.sha256 == two.weights.sha256
