"""Compare the drafter with numbers from public reference code: `python tests/golden.py DIR`.

DIR holds config.json, model.safetensors (a drafter in the published format) and case.safetensors (inputs, frozen
embedding and lm_head, expected hidden states, loss and gradients). Prints the largest differences; exit code 1 if one
is beyond its bound.
"""

import argparse
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from dflash_core.drafter.attention import Blocks
from dflash_core.drafter.folder import load_drafter
from dflash_core.drafter.model import embed_blocks
from dflash_core.drafter.objective import SlotWeights, block_loss, slot_targets

HIDDEN_BOUND, GRADIENT_BOUND = 1e-5, 1e-4
"""On the largest absolute difference."""


def differences(folder: Path) -> dict[str, tuple[float, float]]:
    """Name -> (largest difference, bound)."""
    drafter = load_drafter(folder)
    case = load_file(folder / "case.safetensors")
    config = drafter.config
    input_ids, anchors = case["input_ids"], case["anchors"][None]
    S = input_ids.shape[1]
    blocks = Blocks(anchors, torch.zeros_like(anchors), torch.full_like(anchors, S), torch.ones_like(anchors) > 0)
    inputs = embed_blocks(case["embedding"], input_ids.gather(1, anchors), config, config.block_size)
    hidden = drafter(case["features"], torch.arange(S)[None], inputs, blocks)
    targets = slot_targets(input_ids, case["loss_mask"] > 0, blocks, config.block_size, chunk_rows=8)
    sums = block_loss(hidden, case["lm_head"], targets, SlotWeights("decay", float(case["gamma"])))
    loss = sums.loss / sums.weight
    loss.backward()  # type: ignore[no-untyped-call]
    pairs: dict[str, tuple[Tensor | None, Tensor, float]] = {
        "hidden": (hidden, case["expected_hidden"], HIDDEN_BOUND),
        "loss": (loss, case["expected_loss"][0], HIDDEN_BOUND),
        "gradient of fc": (drafter.fc.weight.grad, case["expected_grad_fc"], GRADIENT_BOUND),
        "gradient of hidden_norm": (
            drafter.hidden_norm.weight.grad,
            case["expected_grad_hidden_norm"],
            GRADIENT_BOUND,
        ),
        "gradient of layer 0 q_proj": (
            drafter.get_parameter("layers.0.self_attn.q_proj.weight").grad,
            case["expected_grad_q0"],
            GRADIENT_BOUND,
        ),
    }
    return {
        name: (
            float("inf") if ours is None or ours.shape != theirs.shape else float((ours.detach() - theirs).abs().max()),
            bound,
        )
        for name, (ours, theirs, bound) in pairs.items()
    }


def main() -> int:
    """Print one line a tensor."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="DIR")
    table = differences(parser.parse_args().folder)
    for name, (difference, bound) in table.items():
        verdict = "" if difference <= bound else "  BEYOND"
        print(f"{name:28} largest difference {difference:.2e}, bound {bound:.0e}{verdict}")
    return int(not all(difference <= bound for difference, bound in table.values()))


if __name__ == "__main__":
    sys.exit(main())
