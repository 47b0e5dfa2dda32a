"""The steady loop of training on random weights: target, buffers, drafter, update, prefetched micro-batches.

What `train_step.py` measures on CUDA and `gpu_check.py` checks there; every function takes its devices, so that the
tests run the same code on a CPU with tiny sizes. Shapes: S context tokens, N blocks, K block size, H hidden size.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

import torch
from transformers import Qwen3Config, Qwen3Model

from dflash_core.batches.loader import Batch, Prefetch
from dflash_core.drafter.config import DrafterConfig
from dflash_core.drafter.model import Drafter
from dflash_core.drafter.objective import SlotWeights
from dflash_core.target.files import TargetHead
from dflash_core.target.hooked import HookedTarget
from dflash_core.training.features import FeatureFeed, Preparation, PreparedBatch, prepare
from dflash_core.training.step import Learner, Outcome, Rules

PEAK_BF16 = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "RTX 4090": 165e12}
"""Dense bf16 FLOP/s from the makers' data sheets, by a part of the device's name."""
RATE = 3e-4
DECAY, DPACE = SlotWeights("decay", 7.0), SlotWeights("dpace", 7.0)


@dataclass(frozen=True)
class Sizes:
    """One random target and its drafter."""

    vocabulary: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    target_layers: int
    drafter_layers: int
    captured: int
    window: int
    tokens: int
    """S"""
    anchors: int
    """N"""
    block_size: int


TINY = Sizes(97, 32, 48, 2, 1, 16, 4, 2, 2, 16, 48, 6, 4)
PUBLISHED = Sizes(248_320, 5120, 17_408, 32, 8, 128, 3, 5, 2, 2048, 4096, 512, 16)
"""The published 27B drafter (S S S S F) and a target of three layers of its width: 1.2 billion parameters."""


@dataclass(frozen=True)
class World:
    """Everything a step needs."""

    sizes: Sizes
    target: HookedTarget
    learner: Learner
    feed: FeatureFeed

    def batches(self, count: int) -> Iterator[PreparedBatch]:
        """Prepared micro-batches of one row, each a step of its own: all of the same row."""
        generator = torch.Generator().manual_seed(0)
        on_gpu = "cuda" in (self.target.device.type, self.learner.device.type)
        preparation = Preparation(0, self.sizes.anchors, self.sizes.block_size, 1024, on_gpu)
        ids = torch.randint(self.sizes.vocabulary, (1, self.sizes.tokens), generator=generator)
        for step in range(count):
            row = (torch.zeros(1, dtype=torch.int64), ids, torch.tensor([self.sizes.tokens]), torch.ones_like(ids) > 0)
            yield prepare(Batch(step, 0, True, ("row",), *row), preparation)


def device_of(name: str) -> torch.device:
    """A device as an argument names it; cuda is cuda:0, since devices are told apart by their index."""
    device = torch.device(name)
    return torch.device("cuda", 0) if device.type == "cuda" and device.index is None else device


def make_world(
    sizes: Sizes, target_device: torch.device, drafter_device: torch.device, loss: SlotWeights = DECAY
) -> World:
    """Random weights: bf16 target and ends on CUDA, fp32 on a CPU; fp32 drafter with gradient checkpointing."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if target_device.type == "cuda" else torch.float32
    shape = {
        "vocab_size": sizes.vocabulary,
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.intermediate,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim,
    }
    layer_ids = tuple(range(1, 1 + sizes.captured))
    with torch.device(target_device):
        backbone = Qwen3Model(Qwen3Config(**shape, num_hidden_layers=sizes.target_layers)).to(dtype).eval()
    target = HookedTarget(backbone.requires_grad_(False), layer_ids, target_device)
    config = DrafterConfig(
        **shape,
        num_hidden_layers=sizes.drafter_layers,
        block_size=sizes.block_size,
        mask_token_id=1,
        target_layer_ids=layer_ids,
        num_target_layers=sizes.target_layers,
        layer_types=("sliding_attention",) * (sizes.drafter_layers - 1) + ("full_attention",),
        sliding_window=sizes.window,
    )
    with torch.device(drafter_device):
        drafter = Drafter(config, gradient_checkpointing=True)
        ends = torch.randn(sizes.vocabulary, sizes.hidden, dtype=dtype) * 0.02
    autocast = torch.bfloat16 if drafter_device.type == "cuda" else None
    rules = Rules(loss, clip=1.0, betas=(0.9, 0.95), weight_decay=0.0, autocast=autocast)
    learner = Learner(drafter, TargetHead(ends, ends), rules, files=1)
    buffers = 1 if target_device == drafter_device else 2
    return World(sizes, target, learner, FeatureFeed([target], drafter_device, buffers))


@dataclass(frozen=True)
class Run:
    """Some steady steps."""

    seconds: float
    """A step."""
    waiting_share: float
    losses: tuple[float, ...]


def run_steps(world: World, warm: int, counted: int, steady: Callable[[], None] = lambda: None) -> Run:
    """The trainer's loop: outcomes are read one step late. `steady` is called once the first `warm` steps are done."""
    losses: list[float] = []
    before: Outcome | None = None
    began = waited = 0.0
    with Prefetch(world.batches(warm + counted), 4) as batches:
        for number, (prepared, features) in enumerate(world.feed.feed(batches)):
            if number == warm:
                synchronize(world)
                began, waited = time.perf_counter(), batches.waited_s
                steady()
            assert features is not None
            world.learner.accumulate(prepared, features)
            outcome = world.learner.update(RATE, stop=False)
            if before is not None:
                losses.append(before.read().mean_loss)
            before = outcome
        synchronize(world)
        seconds = time.perf_counter() - began
        waited = batches.waited_s - waited
    assert before is not None
    return Run(seconds / counted, waited / seconds, (*losses, before.read().mean_loss))


def overlap_share(world: World, steps: int) -> dict[str, float]:
    """How much of the shorter of target and drafter hides behind the other: 1 all, 0 none (one device)."""
    together = run_steps(world, 2, steps).seconds
    batches = list(islice(world.batches(steps), steps))
    features = [world.target.features(prepared.batch.ids.to(world.target.device)) for prepared in batches[:1]]

    def targets() -> None:
        for prepared in batches:
            world.target.features(prepared.batch.ids.to(world.target.device, non_blocking=True))

    def drafters() -> None:
        for prepared in batches:
            world.learner.accumulate(prepared.to(world.learner.device), features[0].to(world.learner.device))
            world.learner.update(RATE, stop=False)

    target, drafter = (_timed(world, part) / steps for part in (targets, drafters))
    return {
        "step_s": together,
        "target_s": target,
        "drafter_s": drafter,
        "overlap_share": max(0.0, min(1.0, (target + drafter - together) / min(target, drafter))),
    }


def model_flops(world: World) -> float:
    """FLOPs of a step without recomputation: 2 a weight and token forward, 6 with backward, and the objective's two
    products with the head; attention over S keys counted for the drafter's blocks and the target's causal half."""
    sizes, drafter = world.sizes, world.learner.drafter
    S, Q = sizes.tokens, sizes.anchors * sizes.block_size
    target = sum(p.numel() for p in world.target.backbone.get_submodule("layers").parameters())
    fc, layers = drafter.fc.weight.numel(), sum(p.numel() for p in drafter.layers.parameters())
    context = 2 * sizes.hidden * sizes.kv_heads * sizes.head_dim * sizes.drafter_layers
    keys = sum(S / 2 if window is None else min(window, S / 2) for window in drafter.windows)
    attention = 4 * sizes.heads * sizes.head_dim * (sizes.target_layers * S * S / 2 + 3 * Q * keys)
    objective = 4.0 * (Q - sizes.anchors) * sizes.vocabulary * sizes.hidden
    return 2 * target * S + 6 * (layers * Q + (fc + context) * S) + attention + objective


def utilisation(world: World, seconds: float) -> float | None:
    """Model FLOPs utilisation over all devices in use; None for a device whose peak is not known."""
    devices = {world.target.device, world.learner.device}
    if any(device.type != "cuda" for device in devices):
        return None
    peaks = [_peak(torch.cuda.get_device_name(device)) for device in devices]
    known = [peak for peak in peaks if peak is not None]
    return model_flops(world) / seconds / sum(known) if len(known) == len(peaks) else None


def _peak(name: str) -> float | None:
    return next((peak for part, peak in PEAK_BF16.items() if part in name), None)


def synchronize(world: World) -> None:
    """Wait for both devices."""
    for device in {world.target.device, world.learner.device}:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def _timed(world: World, work: Callable[[], None]) -> float:
    work()
    synchronize(world)
    began = time.perf_counter()
    work()
    synchronize(world)
    return time.perf_counter() - began
