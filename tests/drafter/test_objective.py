"""The chunked loss equals the plain one in value and gradient, holds one chunk of logits, counts as serving does."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from dflash_core.drafter.attention import Blocks
from dflash_core.drafter.objective import SlotTargets, SlotWeights, block_loss, slot_targets

torch.set_num_threads(1)
V, H, K, B, N, S = 31, 8, 5, 2, 4, 24
DECAY, DPACE = SlotWeights("decay", 4.0), SlotWeights("dpace", 4.0, alpha=0.3)


@dataclass
class Case:
    """Inputs of the objective."""

    ids: Tensor
    mask: Tensor
    blocks: Blocks
    hidden: Tensor
    head: Tensor

    def targets(self, chunk_rows: int = 8) -> SlotTargets:
        return slot_targets(self.ids, self.mask, self.blocks, K, chunk_rows)


@pytest.fixture
def case() -> Case:
    """Two rows: four blocks, the last of them reaching past the end; three blocks and a padding one."""
    torch.manual_seed(0)
    anchor = torch.tensor([[2, 9, 10, 21], [4, 5, 15, 0]])
    valid = torch.tensor([[True] * 4, [True, True, True, False]])
    blocks = Blocks(anchor, torch.zeros_like(anchor), torch.full_like(anchor, S), valid)
    mask = torch.rand(B, S) > 0.3
    hidden = torch.randn(B, N * K, H, dtype=torch.float64)
    return Case(torch.randint(0, V, (B, S)), mask, blocks, hidden, torch.randn(V, H, dtype=torch.float64))


def plain(case: Case, weights: SlotWeights) -> tuple[Tensor, Tensor, Tensor]:
    """Loss sum, weight sum and gradient from whole logits, slot by slot."""
    hidden = case.hidden.clone().requires_grad_()
    logits = (hidden @ case.head.T).view(B, N, K, V)
    loss, total = hidden.new_zeros(()), hidden.new_zeros(())
    for b in range(B):
        for n in range(N):
            if not case.blocks.valid[b, n]:
                continue
            ce: dict[int, Tensor] = {}
            for k in range(1, K):
                token = int(case.blocks.anchor[b, n]) + k
                if token < S and case.mask[b, token]:
                    ce[k] = F.cross_entropy(logits[b, n, k], case.ids[b, token])
            for j in ce:
                if weights.kind == "decay":
                    weight = torch.tensor(-(j - 1) / weights.gamma).double().exp()
                else:
                    reached = {}
                    for m in ce:
                        q = [(1 - weights.alpha) * (-ce[i].detach()).exp() + weights.alpha for i in ce if i <= m]
                        reached[m] = torch.stack(q).prod()
                    weight = torch.stack([reached[m] for m in ce if m >= j]).sum()
                loss, total = loss + weight * ce[j], total + weight
    (gradient,) = torch.autograd.grad(loss, hidden)
    return loss.detach(), total, gradient


@pytest.mark.parametrize("weights", [DECAY, DPACE], ids=["decay", "dpace"])
@pytest.mark.parametrize("chunk_rows", [1, 7, 1000])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_value_and_gradient_equal_the_plain_formulation(
    case: Case, weights: SlotWeights, chunk_rows: int, dtype: torch.dtype, bound: float
) -> None:
    loss, total, gradient = plain(case, weights)
    hidden = case.hidden.to(dtype).requires_grad_()
    sums = block_loss(hidden, case.head.to(dtype), case.targets(chunk_rows), weights)
    (2 * sums.loss).backward()  # type: ignore[no-untyped-call]
    assert hidden.grad is not None
    assert abs(float(sums.loss.detach() - loss)) < bound * float(loss)
    assert abs(float(sums.weight - total)) < bound * float(total)
    torch.testing.assert_close(hidden.grad.double(), 2 * gradient, rtol=0, atol=bound)


def test_labels_are_of_the_slots_own_position_and_slot_0_has_none(case: Case) -> None:
    targets = case.targets()
    for row, label in zip(targets.row.tolist(), targets.label.tolist(), strict=True):
        b, n, k = row // (N * K), row // K % N, row % K
        token = int(case.blocks.anchor[b, n]) + k
        assert k > 0
        assert case.blocks.valid[b, n]
        assert case.mask[b, token]
        assert label == case.ids[b, token]


def test_a_slot_counts_iff_the_token_it_predicts_is_supervised() -> None:
    """Span 8..39, block 4, anchors around its ends, as in a public bug report."""
    mask = torch.zeros(1, 60, dtype=torch.bool)
    mask[0, 8:40] = True
    anchor = torch.tensor([[6, 8, 37, 39]])
    blocks = Blocks(anchor, torch.zeros_like(anchor), torch.full_like(anchor, 60), anchor >= 0)
    targets = slot_targets(torch.arange(60)[None], mask, blocks, 4, 100)
    assert targets.label.tolist() == [8, 9, 9, 10, 11, 38, 39]


def test_slots_beyond_the_document_do_not_count_in_a_packed_row() -> None:
    anchor, start, end = torch.tensor([[7, 12]]), torch.tensor([[0, 10]]), torch.tensor([[10, 20]])
    blocks = Blocks(anchor, start, end, anchor >= 0)
    targets = slot_targets(torch.arange(20)[None], torch.ones(1, 20, dtype=torch.bool), blocks, 5, 100)
    assert targets.label.tolist() == [8, 9, 13, 14, 15, 16]


class LargestTensor(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the most rows of any [rows, V] tensor that comes into being, and all rows that a product with W has had."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rows = 0
        self.multiplied = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if (
            isinstance(out, Tensor)
            and out.shape[-1:] == (V,)
            and out.ndim >= 2
            and func is not torch.ops.aten.t.default
        ):
            self.rows = max(self.rows, out.numel() // V)
            if func is torch.ops.aten.mm.out:
                self.multiplied += out.shape[0]
        return out


@pytest.mark.parametrize("weights", [DECAY, DPACE], ids=["decay", "dpace"])
def test_never_more_logits_than_a_chunk_and_none_for_unsupervised_slots(case: Case, weights: SlotWeights) -> None:
    hidden, targets = case.hidden.requires_grad_(), case.targets(chunk_rows=6)
    with LargestTensor() as seen:
        block_loss(hidden, case.head, targets, weights).loss.backward()  # type: ignore[no-untyped-call]
    assert 0 < seen.rows <= 6
    assert seen.multiplied == len(targets.row) < B * N * (K - 1)


def test_chunks_end_with_blocks(case: Case) -> None:
    targets = case.targets(chunk_rows=5)
    assert targets.bounds[0] == 0
    assert targets.bounds[-1] == len(targets.row)
    for bound in targets.bounds[1:-1]:
        assert targets.row[bound] // K != targets.row[bound - 1] // K


def test_sums_of_parts_are_the_sums_of_the_whole(case: Case) -> None:
    whole = block_loss(case.hidden, case.head, case.targets(), DECAY)
    parts = []
    for b in range(B):
        part = Case(
            case.ids[b : b + 1],
            case.mask[b : b + 1],
            Blocks(*(t[b : b + 1] for t in case.blocks)),
            case.hidden[b : b + 1],
            case.head,
        )
        parts.append(block_loss(part.hidden, part.head, part.targets(), DECAY))
    for name in ("loss", "weight"):
        torch.testing.assert_close(sum(getattr(p, name) for p in parts), getattr(whole, name), rtol=0, atol=1e-12)
    for name in ("row_loss", "row_weight", "row_prefix", "row_blocks", "slot_hits", "slot_counts"):
        torch.testing.assert_close(
            torch.cat([getattr(p, name) for p in parts]), getattr(whole, name), rtol=0, atol=1e-12
        )
    torch.testing.assert_close(whole.row_loss.sum(), whole.loss, rtol=0, atol=1e-12)


def test_the_accepted_prefix_is_of_joint_hits() -> None:
    """Hits 110|1, 011|1 and 1111 accept 2, 0 and 4; marginals would make it 2/3 + 4/9 + ..."""
    wanted = torch.tensor([[1, 1, 0, 1], [0, 1, 1, 1], [1, 1, 1, 1]])
    head, ids = torch.eye(H), torch.arange(18)[None] % H
    anchor = torch.tensor([[0, 5, 10]])
    blocks = Blocks(anchor, torch.zeros_like(anchor), torch.full_like(anchor, 18), anchor >= 0)
    targets = slot_targets(ids, torch.ones(1, 18, dtype=torch.bool), blocks, K, 100)
    hidden = torch.zeros(1, 15, H)
    for row, label, hit in zip(targets.row.tolist(), targets.label.tolist(), wanted.flatten().tolist(), strict=True):
        hidden[0, row, label if hit else (label + 1) % H] = 1
    sums = block_loss(hidden, head, targets, DECAY)
    assert sums.row_prefix.tolist() == [6]
    assert sums.row_blocks.tolist() == [3]
    assert sums.slot_hits.tolist() == [[2, 3, 2, 3]]
    assert sums.slot_counts.tolist() == [[3, 3, 3, 3]]


@pytest.mark.parametrize("weights", [DECAY, DPACE], ids=["decay", "dpace"])
def test_a_batch_without_supervised_slots_gives_zeros(case: Case, weights: SlotWeights) -> None:
    case.mask[:] = False
    hidden = case.hidden.requires_grad_()
    sums = block_loss(hidden, case.head, case.targets(), weights)
    sums.loss.backward()  # type: ignore[no-untyped-call]
    assert hidden.grad is not None
    assert hidden.grad.eq(0).all()
    assert (float(sums.loss.detach()), float(sums.weight)) == (0, 0)
    assert sums.row_blocks.tolist() == [4, 3]


def test_without_gradients_the_numbers_are_the_same(case: Case) -> None:
    with_gradient = block_loss(case.hidden.requires_grad_(), case.head, case.targets(), DPACE)
    with torch.no_grad():
        without = block_loss(case.hidden, case.head, case.targets(), DPACE)
    for one, other in zip(with_gradient, without, strict=True):
        assert torch.equal(one, other)


def test_a_head_that_wants_a_gradient_is_refused(case: Case) -> None:
    with pytest.raises(ValueError, match="frozen"):
        block_loss(case.hidden, case.head.requires_grad_(), case.targets(), DECAY)


def test_bfloat16_is_close() -> None:
    torch.manual_seed(0)
    anchor = torch.arange(0, 60, 6)[None]
    blocks = Blocks(anchor, torch.zeros_like(anchor), torch.full_like(anchor, 70), anchor >= 0)
    targets = slot_targets(torch.randint(0, V, (1, 70)), torch.ones(1, 70, dtype=torch.bool), blocks, K, 9)
    hidden, head = torch.randn(1, 50, 64).bfloat16(), (torch.randn(V, 64) / 8).bfloat16()
    losses, gradients = [], []
    for dtype in (torch.bfloat16, torch.float32):
        leaf = hidden.to(dtype).detach().clone().requires_grad_()
        sums = block_loss(leaf, head.to(dtype), targets, DECAY)
        sums.loss.backward()  # type: ignore[no-untyped-call]
        assert leaf.grad is not None
        losses.append(float(sums.loss.detach()))
        gradients.append(leaf.grad.float())
    assert abs(losses[0] / losses[1] - 1) < 0.01
    torch.testing.assert_close(gradients[0], gradients[1], rtol=0.05, atol=0.02)
