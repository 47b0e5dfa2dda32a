"""The step: one update whatever the number of ranks, and nothing that is not finite ever reaches the weights."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModel

from dflash_core.batches.loader import Batch, Loader, StepShape
from dflash_core.batches.rows import RowStore
from dflash_core.drafter import attention, model
from dflash_core.drafter.config import DrafterConfig
from dflash_core.drafter.model import Drafter
from dflash_core.drafter.objective import LossSums, SlotWeights, block_loss
from dflash_core.recipe import TrainingSettings
from dflash_core.target.files import TargetHead, load_head
from dflash_core.target.hooked import HookedTarget, load_target
from dflash_core.training import step
from dflash_core.training.features import FeatureFeed, Preparation, PreparedBatch, prepare
from dflash_core.training.step import Arrival, Learner, Rules, StepOverdue, StepSums, learning_rate
from tests.training.conftest import MASK, VOCABULARY, random_rows, row_store
from tests.training.ranks import run_ranks
from tests.waits import Waits

CPU, META = torch.device("cpu"), torch.device("meta")
CONFIG = DrafterConfig(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=48,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    num_hidden_layers=2,
    block_size=4,
    mask_token_id=MASK,
    target_layer_ids=(1, 3),
    num_target_layers=5,
    layer_types=("sliding_attention", "full_attention"),
    sliding_window=16,
)
PREPARATION = Preparation(seed=0, anchors=6, block_size=4, chunk_rows=32)
World = tuple[HookedTarget, TargetHead]
RULES = Rules(SlotWeights("decay", 4.0), clip=1.0, betas=(0.9, 0.95), weight_decay=0.01, autocast=None)


@pytest.fixture(scope="module")
def rows() -> RowStore:
    return row_store({"a": random_rows(0, 19), "b": random_rows(1, 19)})


@pytest.fixture(scope="module")
def world(target_folder: Path) -> World:
    """Target and head in float64: equality is asked for."""
    target = load_target(target_folder, CONFIG.target_layer_ids, torch.float64, CPU)
    return target, load_head(target_folder, torch.float64, CPU)


def make_learner(
    head: TargetHead, rules: Rules = RULES, dtype: torch.dtype = torch.float64, patience_s: float | None = None
) -> Learner:
    drafter = Drafter(CONFIG)
    drafter.initialize(0)
    head = TargetHead(head.embedding.to(dtype), head.lm_head.to(dtype))
    return Learner(drafter.to(dtype), head, rules, files=2, patience_s=patience_s)


def steps(
    learner: Learner,
    target: HookedTarget,
    loader: Loader,
    count: int,
    change: Callable[[PreparedBatch], PreparedBatch] = lambda prepared: prepared,
) -> Iterator[StepSums]:
    """Train `count` steps and yield their sums."""
    all_prepared = (change(prepare(batch, PREPARATION)) for batch in loader.batches(0, count))
    for prepared, features in FeatureFeed([target], CPU, 2).feed(all_prepared):
        if features is not None:
            learner.accumulate(prepared, features)
        if prepared.batch.last:
            yield learner.update(1e-2, stop=False).read()


def full_batch(rows: RowStore) -> Batch:
    """A micro-batch of four rows."""
    return next(b for b in Loader(rows, np.arange(len(rows)), 0, StepShape(4)).batches(0, 9) if len(b.row_ids) == 4)


def weights(learner: Learner) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in learner.drafter.parameters()])


def trained(rows: RowStore, world: World, shape: StepShape, rules: Rules = RULES) -> tuple[Any, Any, Any]:
    """Weights, losses and coverage after ten steps; the last step of an epoch is short."""
    learner = make_learner(world[1], rules)
    loader = Loader(rows, np.arange(len(rows)), 0, shape)
    losses = [sums.loss / sums.weight for sums in steps(learner, world[0], loader, 10)]
    return weights(learner).numpy(), losses, learner.reduced_coverage().numpy()


@pytest.mark.parametrize("kind", ["decay", "dpace"])
def test_ranks_and_accumulation_do_not_change_the_update(
    rows: RowStore, world: World, tmp_path: Path, kind: Any
) -> None:
    rules = replace(RULES, weights=SlotWeights(kind, 4.0))
    alone, losses, coverage = trained(rows, world, StepShape(8), rules)
    assert losses[-1] < losses[0]
    for batch_rows, accumulation, ranks in ((4, 2, 1), (1, 8, 1), (4, 1, 2), (2, 2, 2), (2, 1, 4)):
        shape = StepShape(batch_rows, accumulation, 0, ranks)

        def work(rank: int, shape: StepShape = shape) -> tuple[Any, Any, Any]:
            return trained(rows, world, replace(shape, rank=rank), rules)

        for got, got_losses, got_coverage in [work(0)] if ranks == 1 else run_ranks(ranks, work, tmp_path):
            assert np.abs(got - alone).max() < 1e-10
            assert np.allclose(got_losses, losses, rtol=1e-10)
            assert np.allclose(got_coverage, coverage, rtol=1e-10)


def test_the_update_is_that_of_a_plain_mean_loss(rows: RowStore, world: World) -> None:
    """One step against torch's own: loss over the whole step, backward, clip_grad_norm_, AdamW."""
    learner, plain = make_learner(world[1]), make_learner(world[1])
    loader = Loader(rows, np.arange(len(rows)), 0, StepShape(4, 2))
    sums = next(steps(learner, world[0], loader, 1))
    total = weight = torch.zeros((), dtype=torch.float64)
    for batch in loader.step_batches(0):
        prepared = prepare(batch, PREPARATION)
        features = world[0].features(batch.ids)
        loss = plain._loss(prepared, features, torch.ones(len(batch.row_ids), dtype=torch.bool))
        total, weight = total + loss.loss, weight + loss.weight
    parameters = list(plain.drafter.parameters())
    for parameter in parameters:
        parameter.grad = None
    (total / weight).backward()
    norm = torch.nn.utils.clip_grad_norm_(parameters, RULES.clip)
    torch.optim.AdamW(parameters, lr=1e-2, betas=RULES.betas, weight_decay=RULES.weight_decay).step()
    assert sums.grad_norm == pytest.approx(float(norm), rel=1e-12)
    torch.testing.assert_close(weights(learner), weights(plain), rtol=1e-9, atol=1e-12)


def test_gradients_leave_while_backward_still_runs(rows: RowStore, world: World, tmp_path: Path) -> None:
    """Layers last to first, and only in the last micro-batch of a step; the same on a rank that has no row there."""

    def work(rank: int) -> list[str]:
        learner = make_learner(world[1])
        told: list[str] = []
        reduce, backward = torch.distributed.all_reduce, torch.Tensor.backward
        sizes = {sum(p.numel() for p in layer.parameters()): "layer" for layer in learner.drafter.layers}

        def all_reduce(tensor: torch.Tensor, **options: Any) -> Any:
            told.append(sizes.get(tensor.numel(), "rest" if tensor.numel() > 100 else "counts"))
            return reduce(tensor, **options)

        def marked(tensor: torch.Tensor) -> None:
            told.append("backward begins")
            backward(tensor)
            told.append("ends")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.distributed, "all_reduce", all_reduce)
            patch.setattr(torch.Tensor, "backward", marked)
            # Three rows on two ranks, one a micro-batch: in the second one rank 1 has nothing.
            list(steps(learner, world[0], Loader(rows, np.arange(3), 0, StepShape(1, 2, rank, 2)), 1))
        return told

    busy, idle = run_ranks(2, work, tmp_path)
    first = ["backward begins", "ends"]
    assert busy == [*first, "backward begins", "layer", "layer", "rest", "ends", "counts"]
    assert idle == [*first, "layer", "layer", "rest", "counts"]


def test_fp32_gradients_agree_over_ranks(rows: RowStore, world: World, tmp_path: Path) -> None:
    def gradient(shape: StepShape) -> Any:
        learner = make_learner(world[1], dtype=torch.float32)
        loader = Loader(rows, np.arange(len(rows)), 0, shape)
        kept: list[torch.Tensor] = []
        learner.optimizer.step = lambda: kept.append(learner._flat.clone())  # type: ignore[method-assign, assignment]
        next(steps(learner, world[0], loader, 1))
        return kept[0].numpy()

    alone = gradient(StepShape(8))
    for got in run_ranks(2, lambda rank: gradient(StepShape(4, 1, rank, 2)), tmp_path):
        assert np.linalg.norm(got - alone) <= 1e-6 * np.linalg.norm(alone)


def poison(prepared: PreparedBatch, row: int) -> PreparedBatch:
    """Make one block of a micro-batch NaN: its anchor is a token whose embedding is NaN."""
    tokens = prepared.anchor_tokens.clone()
    tokens[row, 0] = VOCABULARY
    return replace(prepared, anchor_tokens=tokens)


def with_poisoned_embedding(head: TargetHead) -> TargetHead:
    bad = torch.full((1, CONFIG.hidden_size), float("nan"), dtype=head.embedding.dtype)
    return TargetHead(torch.cat((head.embedding, bad)), head.lm_head)


def test_a_step_that_is_not_finite_changes_nothing(rows: RowStore, world: World) -> None:
    learner = make_learner(with_poisoned_embedding(world[1]))
    loader = Loader(rows, np.arange(len(rows)), 0, StepShape(4, 2))
    before: list[torch.Tensor] = []
    for index, sums in enumerate(
        steps(
            learner,
            world[0],
            loader,
            4,
            lambda prepared: poison(prepared, 1) if prepared.batch.step == 2 and prepared.batch.last else prepared,
        )
    ):
        masters, moments = learner.state()
        now = torch.cat([t.flatten().double() for t in (*masters.values(), *moments.values())])
        assert sums.finite == (index != 2)
        assert torch.isfinite(now).all()
        assert torch.isfinite(learner.coverage).all()
        if index == 2:
            assert torch.equal(now, before[-1])
        else:
            assert not before or not torch.equal(now, before[-1])
        before.append(now)
    assert set(learner.state()[1]["step.fc.weight"].flatten().tolist()) == {3.0}


@pytest.mark.parametrize("poisoned", ["gradient", "loss"])
def test_a_gradient_or_a_loss_alone_that_is_not_finite_skips_the_step(
    rows: RowStore, world: World, poisoned: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A product may overflow in backward alone; and a slot whose token is impossible has a gradient like any other."""
    learner, prepared = make_learner(world[1]), prepare(full_batch(rows), PREPARATION)
    before = weights(learner)
    if poisoned == "gradient":
        learner.drafter.norm.weight.register_hook(lambda gradient: gradient * float("inf"))
    else:
        monkeypatch.setattr(step, "block_loss", lambda *given: infinite_in_one_row(block_loss(*given)))
    learner.accumulate(prepared, world[0].features(prepared.batch.ids))
    sums = learner.update(1e-2, stop=False).read()
    assert sums.finite == 0.0
    assert np.isfinite(sums.loss) == (poisoned == "gradient")
    assert np.isfinite(sums.grad_norm) == (poisoned == "loss")
    assert torch.equal(weights(learner), before)


def infinite_in_one_row(sums: LossSums) -> LossSums:
    row_loss = sums.row_loss.clone()
    row_loss[0] = float("inf")
    return sums._replace(row_loss=row_loss)


def test_all_ranks_skip_when_one_is_not_finite(rows: RowStore, world: World, tmp_path: Path) -> None:
    def work(rank: int) -> tuple[list[float], Any]:
        learner = make_learner(with_poisoned_embedding(world[1]))
        loader = Loader(rows, np.arange(len(rows)), 0, StepShape(4, 1, rank, 2))

        def change(prepared: PreparedBatch) -> PreparedBatch:
            return poison(prepared, 0) if rank == 1 and prepared.batch.step == 1 else prepared

        finite = [sums.finite for sums in steps(learner, world[0], loader, 3, change)]
        return finite, weights(learner).numpy()

    (finite0, weights0), (finite1, weights1) = run_ranks(2, work, tmp_path)
    assert finite0 == finite1 == [1.0, 0.0, 1.0]
    assert np.array_equal(weights0, weights1)
    assert np.isfinite(weights0).all()


def test_a_row_with_bad_features_counts_as_if_it_were_not_there(rows: RowStore, world: World) -> None:
    """The other rows of its micro-batch give the very update they would give without it."""
    target, head = world
    batch = full_batch(rows)
    prepared, features = prepare(batch, PREPARATION), target.features(batch.ids)
    features[2, 3, 5] = float("inf")
    learner, without = make_learner(head), make_learner(head)
    learner.accumulate(prepared, features)
    kept = [0, 1, 3]
    smaller = replace(
        batch,
        row_ids=tuple(batch.row_ids[i] for i in kept),
        files=batch.files[kept],
        ids=batch.ids[kept],
        lengths=batch.lengths[kept],
        loss_mask=batch.loss_mask[kept],
    )
    without.accumulate(prepare(smaller, PREPARATION), target.features(smaller.ids))
    got, expected = learner.update(1e-2, False).read(), without.update(1e-2, False).read()
    assert (got.bad_rows, got.rows, got.finite) == (1.0, 3.0, 1.0)
    assert got.loss == pytest.approx(expected.loss, rel=1e-12)
    assert (got.slot_hits, got.slot_counts) == (expected.slot_hits, expected.slot_counts)
    torch.testing.assert_close(weights(learner), weights(without), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(learner.coverage, without.coverage)


@pytest.mark.parametrize(("ranks", "patience_s"), [(1, None), (2, 7.0)])
def test_whatever_waits_for_other_ranks_has_an_end(
    rows: RowStore,
    world: World,
    ranks: int,
    patience_s: float | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[float | None] = []

    def arrival(tensor: torch.Tensor, patience_s: float | None) -> Arrival:
        seen.append(patience_s)
        return Arrival(tensor, patience_s)

    monkeypatch.setattr(step, "Arrival", arrival)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: ranks > 1)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: ranks)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *_, **__: SimpleNamespace(wait=lambda: None))
    learner = make_learner(world[1], patience_s=7.0)
    list(steps(learner, world[0], Loader(rows, np.arange(len(rows)), 0, StepShape(8)), 2))
    learner.evaluated()
    learner.reduced_coverage()
    assert seen == [patience_s] * 4


@pytest.mark.parametrize("kind", ["decay", "dpace"])
def test_a_step_never_waits_for_the_device(
    rows: RowStore, world: World, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = make_learner(world[1], replace(RULES, weights=SlotWeights(kind, 4.0)))
    prepared = prepare(full_batch(rows), PREPARATION)
    features = world[0].features(prepared.batch.ids)
    calls = attention._calls
    with Waits() as waits:

        def on_a_cpu_alone(*arguments: Any) -> Any:
            """SDPA's slices, which it makes from the anchors' values; CUDA has flex attention instead."""
            waits.paused = True
            made = calls(*arguments)
            waits.paused = False
            return made

        monkeypatch.setattr(attention, "_calls", on_a_cpu_alone)
        learner.accumulate(prepared, features)
        learner.update(1e-2, stop=False)
        assert waits.seen == []
        learner.reduced_coverage().tolist()
        assert len(waits.seen) == 1


@pytest.mark.parametrize("kind", ["decay", "dpace"])
def test_nothing_of_a_step_is_left_on_the_host(
    rows: RowStore, world: World, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The meta device takes the GPUs' place: it refuses a tensor of the CPU next to its own, and to be read."""

    def kernel(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, block_mask: Any, **_: Any) -> torch.Tensor:
        index = torch.zeros(1, dtype=torch.int64, device=META)
        assert block_mask.mask_mod(index, index, index, index).device == META
        assert block_mask.kv_indices.device == block_mask.full_kv_indices.device == META
        return query + key.sum() + value.sum()

    monkeypatch.setattr(model, "attention", attention.FlexAttention)
    monkeypatch.setattr(attention, "_compiled_flex", lambda: kernel)
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())  # which the meta device does not know
    monkeypatch.setattr(step, "Arrival", lambda tensor, _: SimpleNamespace(tensor=tensor))
    head = TargetHead(*(end.to(META, torch.float32) for end in (world[1].embedding, world[1].lm_head)))
    learner = Learner(Drafter(CONFIG).to(META), head, replace(RULES, weights=SlotWeights(kind, 4.0)), files=2)
    backbone = AutoModel.from_config(world[0].backbone.config)  # type: ignore[no-untyped-call]
    backbone.to(META, torch.float32)
    asked: list[torch.device] = []  # an embedding of the meta device would take ids of the host
    backbone.register_forward_pre_hook(lambda _, __, given: asked.append(given["input_ids"].device), with_kwargs=True)
    feed = FeatureFeed([HookedTarget(backbone, CONFIG.target_layer_ids, META)], META, buffers_per_target=2)
    prepared = prepare(full_batch(rows), PREPARATION)
    for moved, features in feed.feed([prepared] * 3):
        assert features is not None
        learner.accumulate(moved, features)
    assert asked == [META] * 3
    learner.evaluate(prepared.to(META), torch.empty(4, prepared.batch.ids.shape[1], 64, device=META))
    assert learner.update(1e-2, stop=False)._arrival.tensor.device == META  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="meta"):
        learner.accumulate(prepared, torch.empty(4, prepared.batch.ids.shape[1], 64, device=META))


def test_a_step_without_a_supervised_slot_changes_nothing(rows: RowStore, world: World) -> None:
    learner = make_learner(world[1])
    batch = full_batch(rows)
    masked = prepare(replace(batch, loss_mask=torch.zeros_like(batch.loss_mask)), PREPARATION)
    before = weights(learner)
    learner.accumulate(masked, world[0].features(batch.ids))
    sums = learner.update(1e-2, False).read()
    assert (sums.finite, sums.weight, sums.loss) == (0.0, 0.0, 0.0)
    assert torch.equal(weights(learner), before)
    learner.accumulate(prepare(batch, PREPARATION), world[0].features(batch.ids))
    assert learner.update(1e-2, False).read().finite == 1.0


def test_coverage_adds_up_to_the_steps(rows: RowStore, world: World) -> None:
    learner = make_learner(world[1])
    loader = Loader(rows, np.arange(len(rows)), 0, StepShape(8))
    every = list(steps(learner, world[0], loader, 5))
    totals = learner.coverage.sum(0).tolist()
    for column, name in enumerate(("rows", "tokens", "blocks", "loss", "weight", "prefix")):
        assert totals[column] == pytest.approx(sum(getattr(sums, name) for sums in every))
    assert learner.coverage[:, 0].tolist() == [19.0, 19.0]


def test_validation_changes_neither_weights_nor_the_running_step(rows: RowStore, world: World) -> None:
    learner, plain = make_learner(world[1]), make_learner(world[1])
    loader = Loader(rows, np.arange(len(rows)), 0, StepShape(8))
    for index, _ in enumerate(steps(learner, world[0], loader, 4)):
        prepared = prepare(next(iter(loader.step_batches(index))), PREPARATION)
        learner.evaluate(prepared, world[0].features(prepared.batch.ids))
        assert learner.evaluated().rows == len(prepared.batch.row_ids)
    list(steps(plain, world[0], loader, 4))
    assert torch.equal(weights(learner), weights(plain))
    assert torch.equal(learner.coverage, plain.coverage)


def test_one_buffer_gives_the_numbers_of_two(rows: RowStore, world: World) -> None:
    answers = []
    for buffers in (1, 2):
        learner = make_learner(world[1])
        all_prepared = (
            prepare(b, PREPARATION) for b in Loader(rows, np.arange(len(rows)), 0, StepShape(4)).batches(0, 6)
        )
        for prepared, features in FeatureFeed([world[0]], CPU, buffers).feed(all_prepared):
            assert features is not None
            learner.accumulate(prepared, features)
            learner.update(1e-2, False)
        answers.append(weights(learner))
    assert torch.equal(*answers)


class Later:
    """A CUDA event that has passed at the n-th question; None: it never does."""

    def __init__(self, passes: int | None) -> None:
        self.passes = passes
        self.asked = 0
        self.slept = False

    def query(self) -> bool:
        self.asked += 1
        return self.passes is not None and self.asked >= self.passes

    def synchronize(self) -> None:
        assert self.passes is not None, "it sleeps in the driver, forever"
        self.slept = True


def arrival(event: Later, patience_s: float | None) -> Arrival:
    on_the_way: Any = Arrival(torch.arange(3), patience_s)
    on_the_way._done = event
    return on_the_way  # type: ignore[no-any-return]


@pytest.mark.parametrize("passes", [1, 4])
def test_what_comes_is_handed_out_as_soon_as_it_is_there(passes: int) -> None:
    event = Later(passes)
    assert arrival(event, 60.0).wait().tolist() == [0, 1, 2]
    assert event.asked == passes


def test_what_never_comes_ends_the_wait_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(step, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    with pytest.raises(StepOverdue, match=r"within 0\.05 s: it waits for a rank that hangs.*placement\.timeout_s"):
        arrival(Later(None), 0.05).wait()
    assert 0.05 < now < 0.06


def test_alone_a_step_may_take_as_long_as_it_likes() -> None:
    event = Later(1)
    assert arrival(event, None).wait().tolist() == [0, 1, 2]
    assert event.slept


def test_on_a_cpu_it_is_there_already() -> None:
    assert Arrival(torch.arange(3), 60.0).wait().tolist() == [0, 1, 2]


def rates(schedule: str, steps: int = 200) -> list[float]:
    training = TrainingSettings(learning_rate=1.0, warmup_share=0.1, schedule=schedule)  # type: ignore[arg-type]
    return [learning_rate(step, steps, training) for step in range(steps)]


def test_both_schedules_warm_up_to_the_peak_and_fall_to_almost_nothing() -> None:
    for schedule in ("cosine", "wsd"):
        got = rates(schedule)
        assert got[:20] == [(i + 1) / 20 for i in range(20)]
        assert max(got) == got[19] == 1.0
        assert all(a >= b for a, b in pairwise(got[19:]))
        assert 0 < got[-1] < 0.04


def test_cosine_is_half_in_the_middle_and_wsd_still_at_the_peak() -> None:
    assert abs(rates("cosine")[110] - 0.5) < 1e-12
    assert rates("wsd")[110] == rates("wsd")[163] == 1.0
    assert rates("wsd")[166] < 1.0


def test_one_step_has_a_rate() -> None:
    assert learning_rate(0, 1, TrainingSettings()) > 0
