"""One training step against the plain formulation: time and peak memory, on the CPU; on CUDA how fast a training runs.

    python benchmarks/train_step.py [--json OUT] [--steps 3] [--threads 1] [--small] [--specforge CHECKOUT]
    python benchmarks/train_step.py --device cuda:0 [--drafter-device cuda:1]     tokens/s, MFU, overlap and waiting

Plain means what one writes first: anchors as drawn, one dense mask built anew each step, all logits at once. Both run
on the same weights, anchors and inputs in one process; loss and gradients are compared before anything is timed. Memory
is measured in a fresh process each: the peak of resident memory minus what was resident before, the head's weight
excluded. Sizes: H 576, S 1024, N 128, K 16, V 248,320 (`--small`: V 8,192). With `--specforge` its own module runs the
same step (`vs_specforge`: its time / ours); with `--device` the published drafter trains on a random target.
"""

# ruff: noqa: E402 - the folder holds a tokenize.py, which must not hide the standard library's: it leaves the path
import sys
from os.path import dirname

sys.path[0] = dirname(dirname(__file__)) if __name__ == "__main__" else sys.path[0]

import argparse
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaModel

from benchmarks.pipeline import DECAY, PUBLISHED, TINY, device_of, make_world, overlap_share, run_steps, utilisation
from benchmarks.specforge_step import specforge_step
from dflash_core.drafter import model
from dflash_core.drafter.attention import Attention, Blocks, boolean_mask
from dflash_core.drafter.config import DrafterConfig
from dflash_core.drafter.model import Drafter, embed_blocks
from dflash_core.drafter.objective import SlotTargets, block_loss, slot_targets

H, S, N, K, V, V_SMALL = 576, 1024, 128, 16, 248_320, 8_192
LAYERS, CHUNK_ROWS = 5, 1024
TARGET_LAYERS = 27
"""Of SmolLM2-135M's 30: up to the deepest captured one."""


class Case(NamedTuple):
    """Inputs of a step, the same for both forms up to the order of the anchors."""

    drafter: Drafter
    head: Tensor
    features: Tensor
    ids: Tensor
    blocks: Blocks
    """Anchors as they were drawn."""


@dataclass(frozen=True)
class DenseAttention:
    """Plain: one call over all keys under one boolean mask, built from nothing in every step."""

    masks: dict[int | None, Tensor]

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, window: int | None) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=self.masks[window][:, None], enable_gqa=True)


def dense_attention(blocks: Blocks, shape: tuple[int, int], windows: tuple[int | None, ...]) -> Attention:
    """Takes the place of `attention.attention` while the plain form runs."""
    return DenseAttention({window: boolean_mask(blocks, shape, window) for window in set(windows)})


def make_case(vocabulary: int) -> Case:
    """Random weights and inputs; the shape is SmolLM2-135M's with the vocabulary of Qwen3.6."""
    torch.manual_seed(0)
    config = DrafterConfig(
        vocab_size=vocabulary,
        hidden_size=H,
        intermediate_size=1536,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        num_hidden_layers=LAYERS,
        block_size=K,
        mask_token_id=1,
        target_layer_ids=(1, 8, 14, 20, 26),
        num_target_layers=30,
        layer_types=("full_attention",) * LAYERS,
    )
    drafter = Drafter(config)
    drafter.initialize(0)
    anchors = torch.randperm(S - K)[:N][None]
    blocks = Blocks(anchors, torch.zeros_like(anchors), torch.full_like(anchors, S), torch.ones(1, N, dtype=torch.bool))
    head = torch.randn(vocabulary, H) * 0.02
    return Case(drafter, head, torch.randn(1, S, 5 * H), torch.randint(vocabulary, (1, S)), blocks)


def hidden_states(case: Case, blocks: Blocks) -> Tensor:
    """The drafter's output [1, N*K, H] for these blocks."""
    slots = embed_blocks(case.head, case.ids.gather(1, blocks.anchor), case.drafter.config, K)
    out: Tensor = case.drafter(case.features, torch.arange(S)[None], slots, blocks)
    return out


def our_targets(case: Case) -> tuple[Blocks, SlotTargets]:
    """What the loader's thread prepares ahead of the step."""
    blocks = case.blocks._replace(anchor=case.blocks.anchor.sort(-1).values)
    return blocks, slot_targets(case.ids, torch.ones_like(case.ids, dtype=torch.bool), blocks, K, CHUNK_ROWS)


def our_step(case: Case) -> Callable[[], Tensor]:
    """Sorted anchors, sliced attention, chunked objective."""
    blocks, targets = our_targets(case)

    def step() -> Tensor:
        sums = block_loss(hidden_states(case, blocks), case.head, targets, DECAY)
        loss = sums.loss / sums.weight
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    return step


def plain_loss(hidden: Tensor, case: Case) -> Tensor:
    """Cross-entropy over the whole logits at once, slot 0 masked afterwards; [1, N*K, H] -> scalar."""
    slots = torch.arange(K)
    labels = case.ids.gather(1, (case.blocks.anchor[..., None] + slots).flatten(1)).flatten()
    weight = (torch.exp((1 - slots) / DECAY.gamma) * (slots > 0)).repeat(N)
    ce = F.cross_entropy(hidden[0] @ case.head.t(), labels, reduction="none")
    return (weight * ce).sum() / weight.sum()


def plain_step(case: Case) -> Callable[[], Tensor]:
    """Everything anew and at once."""

    def step() -> Tensor:
        ours, model.attention = model.attention, dense_attention  # type: ignore[assignment]
        try:
            loss = plain_loss(hidden_states(case, case.blocks), case)
            loss.backward()  # type: ignore[no-untyped-call]
        finally:
            model.attention = ours
        return loss

    return step


def require_equal(case: Case) -> None:
    """Both forms must compute the same before their times mean anything."""
    answers = []
    for step in (our_step(case), plain_step(case)):
        case.drafter.zero_grad()
        loss = float(step().detach())
        gradients = [p.grad for p in case.drafter.parameters() if p.grad is not None]
        answers.append((loss, torch.cat([g.flatten().clone() for g in gradients])))
    (ours, our_gradient), (plain, plain_gradient) = answers
    difference = float((our_gradient - plain_gradient).norm() / plain_gradient.norm())
    if abs(ours - plain) > 1e-5 * abs(plain) or difference > 1e-4:
        raise SystemExit(f"not the same step: losses {ours} and {plain}, gradients differ by {difference:.1e}")


def seconds(step: Callable[[], object], repeats: int) -> float:
    """Median of single runs."""
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        step()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def objective_bytes(kind: str, vocabulary: int) -> int:
    """Peak of resident memory over one objective, forward and backward, above what is resident before."""
    case = make_case(vocabulary)
    hidden = torch.randn(1, N * K, H, requires_grad=True)
    _, targets = our_targets(case)
    case.head[0].sum()  # resident
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    if kind == "ours":
        sums = block_loss(hidden, case.head, targets, DECAY)
        (sums.loss / sums.weight).backward()  # type: ignore[no-untyped-call]
    else:
        plain_loss(hidden, case).backward()  # type: ignore[no-untyped-call]
    return _status("VmHWM") - before


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    raise KeyError(key)


def in_fresh_process(kind: str, vocabulary: int) -> int:
    """`objective_bytes` where nothing has run before."""
    command = [sys.executable, __file__, "--objective", kind, "--vocabulary", str(vocabulary)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def shares(case: Case) -> dict[str, float]:
    """What part of a step is target, drafter, objective."""
    config = LlamaConfig(
        vocab_size=1024,  # the embedding's size does not enter the time
        hidden_size=H,
        intermediate_size=1536,
        num_hidden_layers=TARGET_LAYERS,
        num_attention_heads=9,
        num_key_value_heads=3,
    )
    target = LlamaModel(config).eval()
    blocks, targets = our_targets(case)

    def run_target() -> None:
        with torch.no_grad():
            target(input_ids=case.ids % 1024, use_cache=False)

    def run_objective() -> None:
        hidden = torch.randn(1, N * K, H, requires_grad=True)
        block_loss(hidden, case.head, targets, DECAY).loss.backward()  # type: ignore[no-untyped-call]

    def run_drafter() -> None:
        hidden_states(case, blocks).sum().backward()  # type: ignore[no-untyped-call]

    parts = {"target": run_target, "drafter": run_drafter, "objective": run_objective}
    times = {name: seconds(part, 1) for name, part in parts.items()}
    return {name: round(value / sum(times.values()), 3) for name, value in times.items()}


def versus_specforge(case: Case, checkout: Path, steps: int) -> dict[str, float]:
    """SpecForge's step, its time as a multiple of ours measured right beside it; the losses must agree."""
    theirs = specforge_step(checkout, case, DECAY.gamma)
    ours = our_step(case)
    losses = [float(step().detach()) for step in (ours, theirs)]
    if abs(losses[0] - losses[1]) > 1e-4 * abs(losses[0]):
        raise SystemExit(f"not the same step: our loss {losses[0]}, SpecForge's {losses[1]}")
    times = [seconds(step, steps) for step in (ours, theirs)]
    return {"specforge_step_s": round(times[1], 3), "vs_specforge": round(times[1] / times[0], 3)}


def training_speed(target: torch.device, drafter: torch.device, small: bool) -> dict[str, object]:
    """The steady loop at the published drafter's shape (`small`: tiny)."""
    world = make_world(TINY if small else PUBLISHED, target, drafter)
    run = run_steps(world, 3, 10)
    return {
        "sizes": asdict(world.sizes),
        "machine": torch.cuda.get_device_name(drafter) if drafter.type == "cuda" else platform.machine(),
        "torch": torch.__version__,
        "step_s": round(run.seconds, 4),
        "tokens_per_s": round(world.sizes.tokens / run.seconds, 1),
        "mfu": utilisation(world, run.seconds),
        "waiting_share": round(run.waiting_share, 4),
        **overlap_share(world, 4),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, help="write the numbers here, too")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--small", action="store_true", help=f"a vocabulary of {V_SMALL:,}: seconds, not minutes")
    parser.add_argument("--specforge", type=Path, metavar="DIR", help="a checkout of SpecForge to compare with")
    parser.add_argument("--device", type=device_of, help="measure a whole training there: cuda:0 (or cpu)")
    parser.add_argument("--drafter-device", type=device_of, help="another GPU for the drafter")
    parser.add_argument("--objective", choices=["ours", "plain"], help=argparse.SUPPRESS)
    parser.add_argument("--vocabulary", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    if given.objective:
        print(objective_bytes(given.objective, given.vocabulary))
        return
    if given.device is not None:
        answer(training_speed(given.device, given.drafter_device or given.device, given.small), given.json)
        return
    vocabulary = V_SMALL if given.small else V
    memory = {kind: in_fresh_process(kind, vocabulary) for kind in ("ours", "plain")}
    case = make_case(vocabulary)
    require_equal(case)
    times = {"ours": seconds(our_step(case), given.steps), "plain": seconds(plain_step(case), given.steps)}
    report = {
        "sizes": {"H": H, "S": S, "N": N, "K": K, "V": vocabulary, "drafter_layers": LAYERS},
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, {given.threads} threads",
        "torch": torch.__version__,
        "step_s": {kind: round(value, 3) for kind, value in times.items()},
        "step_time_ratio": round(times["plain"] / times["ours"], 3),
        "objective_mb": {kind: round(value / 1e6) for kind, value in memory.items()},
        "objective_memory_ratio": round(memory["ours"] / memory["plain"], 3),
        "context_tokens_per_s": round(S / times["ours"], 1),
        "share_of_step": shares(case),
        **({} if given.specforge is None else versus_specforge(case, given.specforge, given.steps)),
    }
    answer(report, given.json)


def answer(report: dict[str, object], file: Path | None) -> None:
    """Print the numbers and write them to the file."""
    print(json.dumps(report, indent=1))
    if file is not None:
        file.write_text(json.dumps(report, indent=1) + "\n", encoding="utf8")


if __name__ == "__main__":
    main()
