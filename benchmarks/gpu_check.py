"""Everything that only a GPU can show, in one run of at most six minutes on one GPU.

    python benchmarks/gpu_check.py [--device cuda:0] [--drafter-device cuda:1] [--json OUT]
    python benchmarks/gpu_check.py --device cpu --tiny          the same logic where there is no GPU; proves nothing

Checks: compiled flex attention equals SDPA forward and backward; no host sync in the steady step; memory of the
objective at V 248,320 against the plain formulation; the published drafter shape on a 1 B-class random target: a
falling loss, tokens/s, MFU, waiting share, and how much of the target hides behind the drafter. Each in a process of
its own, so that none takes the others along; the JSON is written after each.
"""

# ruff: noqa: E402 - the folder holds a tokenize.py, which must not hide the standard library's: it leaves the path
import sys
from os.path import dirname

sys.path[0] = dirname(dirname(__file__)) if __name__ == "__main__" else sys.path[0]

import argparse
import json
import math
import platform
import random
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import flex_attention

from benchmarks.pipeline import (
    DECAY,
    DPACE,
    PUBLISHED,
    TINY,
    Sizes,
    device_of,
    make_world,
    model_flops,
    overlap_share,
    run_steps,
    synchronize,
    utilisation,
)
from dflash_core.drafter.attention import Blocks, FlexAttention, SdpaAttention, block_mask
from dflash_core.drafter.objective import block_loss, slot_targets

FLEX_BOUNDS = {torch.float32: 2e-3, torch.bfloat16: 3e-2}
"""On the largest difference, as a share of the largest value."""
MEMORY_BOUND = 0.25
Checked = dict[str, Any]
"""`passed` (None: cannot be said on this device) and numbers."""


def random_blocks(source: random.Random, N: int, S: int, documents: int) -> Blocks:
    """One row of packed documents with sorted anchors, the last eighth of the blocks padding."""
    bounds = [0, *sorted(source.sample(range(1, S), documents - 1)), S]
    real = N - N // 8
    rows = []
    for anchor in sorted(source.randrange(S) for _ in range(real)):
        document = max(i for i in range(documents) if bounds[i] <= anchor)
        rows.append((anchor, bounds[document], bounds[document + 1], 1))
    table = torch.tensor([rows + [(0, 0, 0, 0)] * (N - real)])
    return Blocks(table[..., 0], table[..., 1], table[..., 2], table[..., 3] > 0)


def flex_equals_sdpa(device: torch.device, tiny: bool) -> Checked:
    """Values and gradients over full, windowed and packed masks, and few blocks; on a CPU flex has no backward.

    In bf16, which trains, flex runs other kernels than in fp32; SDPA is given the same numbers in fp32.
    """
    source, cuda = random.Random(0), device.type == "cuda"
    S, most, K, heads, D = (150, 16, 8, 4, 16) if tiny else (2048, 128, 16, 8, 128)
    worst: dict[str, float] = {}
    for dtype in FLEX_BOUNDS if cuda else (torch.float32,):
        for N, window, documents in (
            (most, None, 1),
            (most, None, 4),
            (most, S // 3, 1),
            (most, S // 3, 3),
            (4, None, 1),
        ):
            blocks = random_blocks(source, N, S, documents).to(device)
            shapes = ((heads, N * K), (heads // 4, S + N * K), (heads // 4, S + N * K))
            inputs = [torch.randn(1, h, n, D, device=device, dtype=dtype, requires_grad=cuda) for h, n in shapes]
            query, key, value = inputs
            ours = (
                # Inductor has no flex for a CPU with such a mask; eager it is slow and right.
                FlexAttention(blocks, (S, K), [window])(query, key, value, window)
                if cuda
                else flex_attention(query, key, value, block_mask=block_mask(blocks, (S, K), window), enable_gqa=True)
            )
            theirs = SdpaAttention(blocks, (S, K), [window])(query.float(), key.float(), value.float(), window)
            assert ours[:, :, (N - N // 8) * K :].eq(0).all(), "padding blocks must give zeros"
            pairs = {"value": [(ours, theirs)], "gradient": []}
            if cuda:
                seed = torch.randn_like(theirs)
                gradients = [torch.autograd.grad((out.float() * seed).sum(), inputs) for out in (ours, theirs)]
                pairs["gradient"] = list(zip(*gradients, strict=True))
            for what, compared in pairs.items():
                name = f"{what} {str(dtype).removeprefix('torch.')}"
                differences = [float(((a - b).abs().max() / b.abs().max()).detach()) for a, b in compared]
                worst[name] = max([worst.get(name, 0.0), *differences])
    bounds = {str(dtype).removeprefix("torch."): bound for dtype, bound in FLEX_BOUNDS.items()}
    passed = all(value < bounds[name.split()[1]] for name, value in worst.items())
    return {"passed": passed, **worst, "gradient_compared": cuda}


def no_sync(device: torch.device, tiny: bool) -> Checked:
    """Steady steps of each loss, every host sync an error; the outcome read one step late waits for an event."""
    sizes = TINY if tiny else Sizes(32_768, 1024, 3072, 16, 8, 64, 4, 3, 3, 512, 1024, 128, 16)
    step_s = {}
    for loss in (DECAY, DPACE):
        world = make_world(sizes, device, device, loss)
        try:
            step_s[loss.kind] = run_steps(world, 3, 5, lambda: _forbid_syncs(device)).seconds
        except RuntimeError as error:
            if "synchroniz" not in str(error):
                raise
            return {"passed": False, "loss": loss.kind, "sync": str(error).splitlines()[0]}
        finally:
            _allow_syncs(device)
    return {"passed": True if device.type == "cuda" else None, "step_s": step_s}


def _forbid_syncs(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")


def _allow_syncs(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("default")


def objective_memory(device: torch.device, tiny: bool) -> Checked:
    """Peak memory above what is there before, forward and backward; N 128, K 16, V 248,320, bf16 head."""
    V, H, N, K, S = (997, 32, 16, 8, 200) if tiny else (248_320, 1024, 128, 16, 4096)
    blocks = random_blocks(random.Random(0), N, S - K, 1)
    ids = torch.randint(V, (1, S))
    targets = slot_targets(ids, torch.ones_like(ids) > 0, blocks, K, 256).to(device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    head = torch.randn(V, H, device=device, dtype=dtype) * 0.02
    hidden = torch.randn(1, N * K, H, device=device, requires_grad=True)

    def ours() -> Tensor:
        sums = block_loss(hidden, head, targets, DECAY)
        return sums.loss / sums.weight

    def plain() -> Tensor:
        slot = targets.row % K
        weight = torch.exp((1 - slot) / DECAY.gamma)
        logits = (hidden.flatten(0, 1).to(dtype) @ head.t()).float()
        ce = F.cross_entropy(logits[targets.row], targets.label, reduction="none")
        return (weight * ce).sum() / weight.sum()

    losses = [float(form().detach()) for form in (ours, plain)]
    peaks = [_peak_bytes(device, form) for form in (ours, plain)]
    ratio = peaks[0] / peaks[1] if peaks[1] else math.nan
    same = abs(losses[0] / losses[1] - 1) < 1e-2
    return {
        "passed": same if device.type == "cpu" else same and ratio <= MEMORY_BOUND,
        "losses": losses,
        "peak_mb": [round(peak / 1e6, 1) for peak in peaks],
        "ratio": None if math.isnan(ratio) else round(ratio, 4),
    }


def _peak_bytes(device: torch.device, form: Callable[[], Tensor]) -> int:
    if device.type != "cuda":
        form().backward()  # type: ignore[no-untyped-call]
        return 0
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    form().backward()  # type: ignore[no-untyped-call]
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def published_shape(device: torch.device, tiny: bool, drafter_device: torch.device) -> Checked:
    """Train some steps; on one device nothing can overlap, so the share counts only between two."""
    world = make_world(TINY if tiny else PUBLISHED, device, drafter_device)
    run = run_steps(world, 3, 6 if tiny else 10)
    overlap = overlap_share(world, 4)
    synchronize(world)
    finite = all(math.isfinite(loss) for loss in run.losses)
    fell = run.losses[-1] < run.losses[0]
    hidden = device == drafter_device or device.type == "cpu" or overlap["overlap_share"] > 0.5
    cuda = drafter_device.type == "cuda"
    return {
        "passed": finite and fell and hidden,
        "parameters": sum(p.numel() for p in world.learner.drafter.parameters()),
        "losses": [round(loss, 4) for loss in run.losses],
        "tokens_per_s": round(world.sizes.tokens / run.seconds, 1),
        "mfu": utilisation(world, run.seconds),
        "flops": model_flops(world),
        "waiting_share": round(run.waiting_share, 4),
        "peak_gb": round(torch.cuda.max_memory_allocated(drafter_device) / 1e9, 2) if cuda else None,
        **{name: round(value, 4) for name, value in overlap.items()},
    }


CHECKS: dict[str, tuple[Callable[[torch.device, bool, torch.device], Checked], float]] = {
    "flex_equals_sdpa": (lambda device, tiny, _: flex_equals_sdpa(device, tiny), 125),
    "no_sync": (lambda device, tiny, _: no_sync(device, tiny), 80),
    "objective_memory": (lambda device, tiny, _: objective_memory(device, tiny), 30),
    "published_shape": (published_shape, 120),
}
"""Each with the seconds that it may take, imports and compilation included: together less than six minutes."""


def checked(name: str, device: torch.device, tiny: bool, drafter_device: torch.device) -> Checked:
    """One check in this process; one that raises is a failed one."""
    try:
        return CHECKS[name][0](device, tiny, drafter_device)
    except Exception as error:  # noqa: BLE001  compilers raise what they like; it is to be told like a failure
        return {"passed": False, "error": f"{type(error).__name__}: {error}"[:2000]}


def apart(arguments: Sequence[str], limit_s: float) -> Checked:
    """The result that this program, called with `arguments`, writes; a failed one where it dies or takes too long.

    A kernel at fault ends every later use of the device in its process, and a hanging one would use up the time of all.
    """
    began, why = time.perf_counter(), ""
    with tempfile.TemporaryDirectory() as folder:
        out, log = Path(folder) / "result.json", Path(folder) / "log"
        command = [sys.executable, __file__, *arguments, "--json", str(out)]
        with log.open("wb") as said, subprocess.Popen(command, stdout=said, stderr=said) as process:
            try:
                process.wait(limit_s)
            except subprocess.TimeoutExpired:
                process.kill()
                why = f"not done within {limit_s:g} s, "
        if out.exists():
            result: Checked = json.loads(out.read_text(encoding="utf8"))
        else:
            tail = log.read_text(encoding="utf8", errors="replace")[-2000:]
            result = {"passed": False, "error": f"{why}exit code {process.returncode}: {tail}"}
    return {**result, "seconds": round(time.perf_counter() - began, 1)}


def main() -> int:
    """Check, print, exit 1 if something failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--device", type=device_of, default="cuda:0", help="of the target, and of everything where there is one"
    )
    parser.add_argument("--drafter-device", type=device_of, help="another GPU for the drafter; default: the same")
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU")
    parser.add_argument("--json", type=Path, help="write the results here, too")
    parser.add_argument("--only", choices=list(CHECKS), help=argparse.SUPPRESS)
    given = parser.parse_args()
    device, drafter_device = given.device, given.drafter_device or given.device
    cuda = device.type == "cuda"
    if cuda and not torch.cuda.is_available():
        print("there is no CUDA device here; run on a machine with one, or try the logic: --device cpu --tiny")
        return 2
    if given.tiny:
        torch.set_num_threads(1)
    if given.only:
        given.json.write_text(json.dumps(checked(given.only, device, given.tiny, drafter_device)), encoding="utf8")
        return 0
    report: Checked = {
        "machine": torch.cuda.get_device_name(device) if cuda else f"{platform.machine()}, no GPU: proves nothing",
        "date": datetime.now(UTC).date().isoformat(),
        "torch": torch.__version__,
        "checks": {},
    }
    where = ["--device", str(device), "--drafter-device", str(drafter_device), *(["--tiny"] if given.tiny else [])]
    for name, (_, limit_s) in CHECKS.items():
        report["checks"][name] = apart([*where, "--only", name], limit_s)
        report["passed"] = all(result["passed"] is not False for result in report["checks"].values())
        if given.json:
            given.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf8")
    print(json.dumps(report, indent=1))
    return 0 if report["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
