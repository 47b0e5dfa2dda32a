"""One rule for what a block sees, and every rendering of it equal to the others."""

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch._dynamo.testing import CompileCounter
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from dflash_core.drafter.attention import (
    MOST_KERNELS,
    TILE,
    Blocks,
    FlexAttention,
    SdpaAttention,
    _compiled_flex,
    block_mask,
    boolean_mask,
)

torch.set_num_threads(1)


def rule(blocks: Blocks, S: int, K: int, window: int | None) -> Tensor:
    """The rules of the paper, cell by cell, by position."""
    B, N = blocks.anchor.shape
    seen = torch.zeros(B, N * K, S + N * K, dtype=torch.bool)
    for b in range(B):
        for n in range(N):
            if not blocks.valid[b, n]:
                continue
            anchor, start = int(blocks.anchor[b, n]), int(blocks.start[b, n])
            for slot in range(K):
                for s in range(start, anchor):
                    seen[b, n * K + slot, s] = window is None or anchor + slot - s < window
                for other in range(K):
                    causal = window is None or 0 <= slot - other < window
                    seen[b, n * K + slot, S + n * K + other] = causal
    return seen


def random_blocks(source: random.Random, B: int, N: int, S: int, documents: int) -> Blocks:
    """Sorted anchors in rows of packed documents, some blocks padding."""
    rows = []
    for _ in range(B):
        bounds = [0, *sorted(source.sample(range(1, S), documents - 1)), S]
        real = source.randint(N // 2, N)
        drawn = sorted(source.randrange(S) for _ in range(real))
        row = []
        for anchor in drawn:
            document = max(i for i in range(documents) if bounds[i] <= anchor)
            row.append((anchor, bounds[document], bounds[document + 1], 1))
        rows.append(row + [(S - 1, 0, S, 0)] * (N - real))  # nothing but `valid` tells them from others
    table = torch.tensor(rows)
    return Blocks(table[..., 0], table[..., 1], table[..., 2], table[..., 3] > 0)


def materialised(mask: BlockMask, Q: int, keys: int) -> tuple[Tensor, int]:
    """The cells a flex kernel would let through: whole tiles unasked, partial ones through mask_mod. And its tiles."""
    B, _, tiles = mask.kv_num_blocks.shape
    seen = torch.zeros(B, tiles * TILE, -(-keys // TILE) * TILE, dtype=torch.bool)
    visited = 0
    for b in range(B):
        for i in range(tiles):
            q = torch.arange(i * TILE, (i + 1) * TILE)
            part = mask.kv_indices[b, 0, i, : mask.kv_num_blocks[b, 0, i]].tolist()
            assert mask.full_kv_num_blocks is not None
            assert mask.full_kv_indices is not None
            whole = mask.full_kv_indices[b, 0, i, : mask.full_kv_num_blocks[b, 0, i]].tolist()
            assert not set(part) & set(whole)
            visited += len(part) + len(whole)
            for j in part:
                kv = torch.arange(j * TILE, (j + 1) * TILE)
                cells = mask.mask_mod(torch.tensor(b), torch.tensor(0), q[:, None], kv[None])
                seen[b, i * TILE : (i + 1) * TILE, j * TILE : (j + 1) * TILE] = cells
            for j in whole:
                seen[b, i * TILE : (i + 1) * TILE, j * TILE : (j + 1) * TILE] = True
    return seen[:, :Q, :keys], visited


@pytest.mark.parametrize("window", [None, 1, 3, 7, 40])
@pytest.mark.parametrize("documents", [1, 3])
def test_the_predicate_is_the_rule(window: int | None, documents: int) -> None:
    source = random.Random(f"{window} {documents}")
    for K in (2, 4, 5):
        blocks = random_blocks(source, 2, 6, 30, documents)
        assert torch.equal(boolean_mask(blocks, (30, K), window), rule(blocks, 30, K, window))


@pytest.mark.parametrize("window", [None, 5, 60, 300])
@pytest.mark.parametrize("documents", [1, 4])
def test_the_block_mask_lets_through_exactly_the_boolean_mask(window: int | None, documents: int) -> None:
    source = random.Random(f"{window} {documents}")
    for S, N, K in ((256, 32, 8), (300, 23, 16), (511, 50, 10), (40, 3, 4), (700, 9, 130)):
        blocks = random_blocks(source, 2, N, S, documents)
        seen, _ = materialised(block_mask(blocks, (S, K), window), N * K, S + N * K)
        assert torch.equal(seen, boolean_mask(blocks, (S, K), window)), (S, N, K)


def test_a_row_without_any_real_block_visits_no_tile() -> None:
    nought = torch.zeros(1, 16, dtype=torch.int64)
    blocks = Blocks(nought, nought, nought, nought > 0)
    seen, visited = materialised(block_mask(blocks, (256, 16), None), 256, 512)
    assert visited == 0
    assert not seen.any()


def test_tiles_that_no_block_reaches_are_left_out_and_inner_ones_are_not_evaluated() -> None:
    anchor = torch.arange(0, 2048, 16)[None]
    blocks = Blocks(anchor, torch.zeros_like(anchor), torch.full_like(anchor, 2048), anchor >= 0)
    full, windowed = (block_mask(blocks, (2048, 16), window) for window in (None, 256))
    every = 16 * 32
    assert materialised(full, 2048, 4096)[1] <= 16 * 17 / 2 + 16
    assert full.full_kv_num_blocks is not None
    assert int(full.full_kv_num_blocks.sum()) == 16 * 15 / 2
    assert materialised(windowed, 2048, 4096)[1] < every / 8


def plain(query: Tensor, key: Tensor, value: Tensor, seen: Tensor) -> Tensor:
    """Softmax attention with zeros where nothing is seen."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = (query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5).masked_fill(~seen[:, None], -1e30)
    weights = torch.softmax(scores, -1) * seen.any(-1)[:, None, :, None]
    return weights @ value


@pytest.mark.parametrize("window", [None, 9])
def test_sliced_sdpa_equals_attention_under_the_whole_mask(window: int | None) -> None:
    source = random.Random(0)
    torch.manual_seed(0)
    S, N, K = 90, 70, 8  # three calls of SDPA, the last one smaller
    blocks = random_blocks(source, 2, N, S, 2)
    query, key, value = (
        torch.randn(2, heads, tokens, 8, dtype=torch.float64, requires_grad=True)
        for heads, tokens in ((4, N * K), (2, S + N * K), (2, S + N * K))
    )
    ours = SdpaAttention(blocks, (S, K), [None, window])(query, key, value, window)
    theirs = plain(query, key, value, boolean_mask(blocks, (S, K), window))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    weights = torch.randn_like(ours)
    gradients = [torch.autograd.grad((out * weights).sum(), (query, key, value)) for out in (ours, theirs)]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_padding_blocks_get_zeros_and_finite_gradients(dtype: torch.dtype) -> None:
    anchor = torch.tensor([[3, 6, 0, 0]])
    blocks = Blocks(
        anchor, torch.zeros_like(anchor), torch.full_like(anchor, 8), torch.tensor([[True, True, False, False]])
    )
    query, key = (torch.randn(1, 2, n, 4).to(dtype).requires_grad_() for n in (16, 24))
    out = SdpaAttention(blocks, (8, 4), [None])(query, key, key, None)
    out.float().square().sum().backward()  # type: ignore[no-untyped-call]
    assert out[:, :, 8:].eq(0).all()
    assert query.grad is not None
    assert key.grad is not None
    assert query.grad[:, :, 8:].eq(0).all()
    assert query.grad.isfinite().all()
    assert key.grad.isfinite().all()


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_and_sdpa_agree_where_flex_runs_here() -> None:
    """Eager flex on the CPU: forward only, but with the same BlockMask that CUDA gets."""
    torch.manual_seed(0)
    S, N, K = 150, 16, 8
    blocks = random_blocks(random.Random(1), 1, N, S, 2)
    query, key, value = torch.randn(1, 2, N * K, 16), torch.randn(1, 2, S + N * K, 16), torch.randn(1, 2, S + N * K, 16)
    for window in (None, 40):
        ours = SdpaAttention(blocks, (S, K), [window])(query, key, value, window)
        theirs = flex_attention(query, key, value, block_mask=block_mask(blocks, (S, K), window))
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def test_new_lengths_and_windows_compile_no_new_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a training run would compile at every step, until torch gave up and went on without a kernel."""
    kernels = CompileCounter()
    compiled = _compiled_flex.__wrapped__(kernels)
    monkeypatch.setattr("dflash_core.drafter.attention._compiled_flex", lambda: compiled)
    source, K = random.Random(0), 8

    def attend(B: int, N: int, S: int, window: int | None) -> None:
        blocks = random_blocks(source, B, N, S, 1)
        query, key = torch.randn(B, 2, N * K, 16), torch.randn(B, 1, S + N * K, 16)
        FlexAttention(blocks, (S, K), [window])(query, key, key, window)

    for window in (None, 40, 60):
        for B in (2, 3, 1):
            for N, S in ((16, 150), (24, 128), (16, 257), (24, 300)):  # one tile of queries, and two
                attend(B, N, S, window)
    assert 1 < kernels.frame_count <= MOST_KERNELS / 4  # up to four of each: gradients or not, two types
    before = kernels.frame_count
    for S, window in ((151, None), (305, 41), (700, 77)):
        attend(4, 24, S, window)
        attend(1, 18, S, window)
    assert kernels.frame_count == before


@pytest.mark.parametrize("N", [1, 3, 7, 40])
def test_few_queries_get_the_kernel_that_many_get(N: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Left to itself torch takes another one below 128 queries, and finds no configuration for 3 to 7 blocks of 16."""
    asked: list[object] = []

    def backend(graph: torch.fx.GraphModule, _inputs: list[Tensor]) -> Callable[..., object]:
        asked.extend(node.args[6] for node in graph.graph.nodes if "flex_attention" in str(node.target))
        return graph.forward

    compiled = _compiled_flex.__wrapped__(backend)
    monkeypatch.setattr("dflash_core.drafter.attention._compiled_flex", lambda: compiled)
    S, K = 150, 16
    query, key = torch.randn(1, 4, N * K, 16), torch.randn(1, 1, S + N * K, 16)
    FlexAttention(random_blocks(random.Random(0), 1, N, S, 1), (S, K), [None])(query, key, key, None)
    assert [options["BACKEND"] for options in asked if isinstance(options, dict)] == ["TRITON"]


def test_too_many_kernels_are_an_error_and_not_attention_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    monkeypatch.setattr(torch._dynamo.config, "recompile_limit", 8)  # it is put back
    monkeypatch.setattr("dflash_core.drafter.attention.MOST_KERNELS", 1)
    compiled = _compiled_flex.__wrapped__("eager")
    single, double = torch.randn(1, 1, 20, 16), torch.randn(1, 1, 20, 16, dtype=torch.float64)
    compiled(single, single, single)
    with pytest.raises(FailOnRecompileLimitHit):
        compiled(double, double, double)
