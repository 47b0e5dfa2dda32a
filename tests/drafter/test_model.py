"""The drafter against a plain re-statement of the paper, and what must not leak into a block."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dflash_core.drafter.attention import Blocks
from dflash_core.drafter.config import DrafterConfig
from dflash_core.drafter.model import ContextCache, Drafter, embed_blocks

torch.set_num_threads(1)
MakeDrafter = Callable[[DrafterConfig], Drafter]
MakeBlocks = Callable[[list[list[int | None]], int], Blocks]
S = 20


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def turned(x: Tensor, position: int, theta: float) -> Tensor:
    """RoPE on one head vector."""
    half = len(x) // 2
    angle = torch.tensor([position / theta ** (i / half) for i in range(half)], dtype=x.dtype)
    low, high = x[:half], x[half:]
    return torch.cat((low * angle.cos() - high * angle.sin(), high * angle.cos() + low * angle.sin()))


def one_block(drafter: Drafter, features: Tensor, anchor: int, inputs: Tensor) -> Tensor:
    """One block [K, H] after the features [S, L*H] of its document, slot by slot and head by head."""
    c, w = drafter.config, drafter.state_dict()
    context = norm(features @ w["fc.weight"].T, w["hidden_norm.weight"], c.rms_norm_eps)[:anchor]
    positions = [*range(anchor), *range(anchor, anchor + len(inputs))]
    x = inputs
    for i in range(c.num_hidden_layers):
        p = f"layers.{i}."
        window = c.sliding_window if c.layer_types[i] == "sliding_attention" else None
        normed = norm(x, w[p + "input_layernorm.weight"], c.rms_norm_eps)
        source = torch.cat((context, normed))
        outputs = []
        for slot in range(len(inputs)):
            heads = []
            for head in range(c.num_attention_heads):
                group = head // (c.num_attention_heads // c.num_key_value_heads)
                rows = slice(head * c.head_dim, (head + 1) * c.head_dim)
                narrow = slice(group * c.head_dim, (group + 1) * c.head_dim)
                q = normed[slot] @ w[p + "self_attn.q_proj.weight"][rows].T
                q = turned(norm(q, w[p + "self_attn.q_norm.weight"], c.rms_norm_eps), anchor + slot, c.rope_theta)
                scores, values = [], []
                for token, position in enumerate(positions):
                    if window is not None and not 0 <= anchor + slot - position < window:
                        continue
                    k = source[token] @ w[p + "self_attn.k_proj.weight"][narrow].T
                    k = turned(norm(k, w[p + "self_attn.k_norm.weight"], c.rms_norm_eps), position, c.rope_theta)
                    scores.append(q @ k / math.sqrt(c.head_dim))
                    values.append(source[token] @ w[p + "self_attn.v_proj.weight"][narrow].T)
                heads.append(torch.softmax(torch.stack(scores), 0) @ torch.stack(values))
            outputs.append(torch.cat(heads) @ w[p + "self_attn.o_proj.weight"].T)
        x = x + torch.stack(outputs)
        h = norm(x, w[p + "post_attention_layernorm.weight"], c.rms_norm_eps)
        gate, up = h @ w[p + "mlp.gate_proj.weight"].T, h @ w[p + "mlp.up_proj.weight"].T
        x = x + (gate * gate.sigmoid() * up) @ w[p + "mlp.down_proj.weight"].T
    return norm(x, w["norm.weight"], c.rms_norm_eps)


def random_case(config: DrafterConfig, rows: int, blocks: int) -> tuple[Tensor, Tensor, Tensor]:
    """Features [rows, S, L*H], positions, and block inputs [rows, N*K, H]."""
    torch.manual_seed(0)
    features = torch.randn(rows, S, config.feature_size, dtype=torch.float64)
    inputs = torch.randn(rows, blocks * config.block_size, config.hidden_size, dtype=torch.float64)
    return features, torch.arange(S)[None], inputs


def test_all_blocks_at_once_equal_each_block_alone_by_the_book(
    any_config: DrafterConfig, make_drafter: MakeDrafter, make_blocks: MakeBlocks
) -> None:
    drafter, K = make_drafter(any_config), any_config.block_size
    features, positions, inputs = random_case(any_config, 2, 3)
    anchors: list[list[int | None]] = [[1, 8, 17], [4, 5, None]]
    hidden = drafter(features, positions, inputs, make_blocks(anchors, S))
    for b, row in enumerate(anchors):
        for n, anchor in enumerate(row):
            if anchor is not None:
                part = slice(n * K, (n + 1) * K)
                alone = one_block(drafter, features[b], anchor, inputs[b, part])
                torch.testing.assert_close(hidden[b, part], alone, rtol=0, atol=1e-10)


def test_features_from_the_anchor_on_and_other_blocks_change_nothing_and_get_no_gradient(
    any_config: DrafterConfig, make_drafter: MakeDrafter, make_blocks: MakeBlocks
) -> None:
    drafter, K = make_drafter(any_config), any_config.block_size
    features, positions, inputs = random_case(any_config, 1, 3)
    anchors = [3, 7, 8]
    blocks = make_blocks([[*anchors]], S)
    features.requires_grad_()
    inputs.requires_grad_()
    hidden = drafter(features, positions, inputs, blocks)
    for n, anchor in enumerate(anchors):
        own = slice(n * K, (n + 1) * K)
        weights = torch.randn(K, any_config.hidden_size, dtype=torch.float64)
        to_features, to_inputs = torch.autograd.grad(
            (hidden[0, own] * weights).sum(), (features, inputs), retain_graph=True
        )
        assert to_features[0, anchor:].eq(0).all()
        assert to_features[0, anchor - 1].ne(0).all()
        assert to_inputs[0, own].ne(0).all()
        to_inputs[0, own] = 0
        assert to_inputs.eq(0).all()
        perturbed_features, perturbed_inputs = features.detach().clone(), inputs.detach().clone()
        perturbed_features[0, anchor:] += 5
        perturbed_inputs += 5
        perturbed_inputs[0, own] -= 5
        perturbed_inputs[0, own] = inputs[0, own].detach()
        again = drafter(perturbed_features, positions, perturbed_inputs, blocks)
        assert torch.equal(again[0, own], hidden[0, own])
        perturbed_features[0, anchor - 1] += 5
        assert not torch.equal(drafter(perturbed_features, positions, inputs, blocks)[0, own], hidden[0, own])


def test_slots_see_later_slots_unless_the_layers_are_sliding(
    config: DrafterConfig, make_drafter: MakeDrafter, make_blocks: MakeBlocks
) -> None:
    sliding = replace(config, layer_types=("sliding_attention",) * 2, sliding_window=50)
    for shape, expected in ((config, True), (sliding, False)):
        drafter = make_drafter(shape)
        features, positions, inputs = random_case(shape, 1, 1)
        inputs.requires_grad_()
        first = drafter(features, positions, inputs, make_blocks([[6]], S))[0, 0].sum()
        (gradient,) = torch.autograd.grad(first, inputs)
        assert bool(gradient[0, -1].ne(0).any()) is expected


def test_a_packed_row_equals_its_documents_alone(any_config: DrafterConfig, make_drafter: MakeDrafter) -> None:
    drafter, K = make_drafter(any_config), any_config.block_size
    features, _, inputs = random_case(any_config, 1, 3)
    positions = torch.cat((torch.arange(9), torch.arange(S - 9)))[None]
    anchor, start, end = torch.tensor([[4, 11, 18]]), torch.tensor([[0, 9, 9]]), torch.tensor([[9, S, S]])
    packed = drafter(features, positions, inputs, Blocks(anchor, start, end, anchor >= 0))
    first = one_block(drafter, features[0, :9], 4, inputs[0, :K])
    second = one_block(drafter, features[0, 9:], 2, inputs[0, K : 2 * K])
    third = one_block(drafter, features[0, 9:], 9, inputs[0, 2 * K :])
    torch.testing.assert_close(packed[0], torch.cat((first, second, third)), rtol=0, atol=1e-10)


@pytest.mark.parametrize("block_size", [2, 4])
def test_decoding_equals_training_however_the_context_arrives(
    any_config: DrafterConfig, make_drafter: MakeDrafter, make_blocks: MakeBlocks, block_size: int
) -> None:
    shape = replace(any_config, block_size=block_size)
    drafter = make_drafter(shape)
    features, positions, inputs = random_case(shape, 1, 2)
    hidden = drafter(features, positions, inputs, make_blocks([[5, 11]], S))
    cache = ContextCache()
    for first, last in ((0, 4), (4, 5)):
        drafter.extend(cache, features[:, first:last])
    torch.testing.assert_close(drafter.draft(cache, inputs[:, :block_size]), hidden[:, :block_size], rtol=0, atol=1e-12)
    drafter.extend(cache, features[:, 5:11])
    assert cache.lengths == [11]
    for _ in range(2):  # drafting leaves the cache as it was
        torch.testing.assert_close(
            drafter.draft(cache, inputs[:, block_size:]), hidden[:, block_size:], rtol=0, atol=1e-12
        )


def test_the_cache_grows_beyond_its_first_buffer(config: DrafterConfig, make_drafter: MakeDrafter) -> None:
    drafter = make_drafter(config)
    features = torch.randn(1, 700, config.feature_size, dtype=torch.float64)
    inputs = torch.randn(1, config.block_size, config.hidden_size, dtype=torch.float64)
    whole, pieces = ContextCache(), ContextCache()
    drafter.extend(whole, features)
    for first in range(0, 700, 70):
        drafter.extend(pieces, features[:, first : first + 70])
    torch.testing.assert_close(drafter.draft(whole, inputs), drafter.draft(pieces, inputs), rtol=0, atol=1e-12)


def test_rows_of_unequal_length_draft_as_each_would_alone(any_config: DrafterConfig, make_drafter: MakeDrafter) -> None:
    drafter, lengths = make_drafter(any_config), (3, 9, 1)
    features, _, inputs = random_case(any_config, 3, 1)
    together = ContextCache(0)
    for row, length in enumerate(lengths):
        one = ContextCache()
        drafter.extend(one, features[row : row + 1, :length])
        together.join(one)
    later, counts = features[:, 9:13], (4, 1, 2)
    drafter.extend(together, later, counts)
    drafted = drafter.draft(together, inputs)
    together.select([2, 0])
    chosen = drafter.draft(together, inputs[[2, 0]])
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        alone = ContextCache()
        drafter.extend(alone, torch.cat((features[row : row + 1, :length], later[row : row + 1, :count]), 1))
        expected = drafter.draft(alone, inputs[row : row + 1])
        torch.testing.assert_close(drafted[row : row + 1], expected, rtol=0, atol=1e-12)
        if row in (2, 0):
            torch.testing.assert_close(chosen[[2, 0].index(row)], expected[0], rtol=0, atol=1e-12)


def test_gradient_checkpointing_and_padding_blocks_leave_gradients_as_they_are(
    any_config: DrafterConfig, make_drafter: MakeDrafter, make_blocks: MakeBlocks
) -> None:
    drafter, K = make_drafter(any_config), any_config.block_size
    features, positions, inputs = random_case(any_config, 1, 3)
    gradients = []
    for checkpointing, row in ((False, [5, 9, None]), (True, [5, 9, None]), (False, [5, 9])):
        drafter.gradient_checkpointing = checkpointing
        drafter.zero_grad()
        hidden = drafter(features, positions, inputs[:, : len(row) * K], make_blocks([[*row]], S))
        assert hidden.isfinite().all()
        hidden[:, : 2 * K].square().sum().backward()
        gradients.append([p.grad.clone() for p in drafter.parameters() if p.grad is not None])
    assert len(gradients[0]) == len(list(drafter.parameters()))
    for other in gradients[1:]:
        for one, two in zip(gradients[0], other, strict=True):
            torch.testing.assert_close(one, two, rtol=0, atol=1e-12)


def test_a_bfloat16_drafter_keeps_exact_positions(config: DrafterConfig) -> None:
    positions = torch.arange(3000)[None]
    exact, ours = (Drafter(config).to(d).rotation(positions, torch.float32) for d in (torch.float32, torch.bfloat16))
    assert torch.equal(exact.cos, ours.cos)


def test_tensors_are_the_published_ones(config: DrafterConfig) -> None:
    names = list(Drafter(config).state_dict())
    assert len(names) == 11 * config.num_hidden_layers + 3
    layer = [
        *("input_layernorm", "post_attention_layernorm"),
        *(f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")),
        *(f"mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")),
    ]
    expected = [f"layers.{i}.{name}.weight" for i in range(config.num_hidden_layers) for name in layer]
    assert sorted(names) == sorted([*expected, "fc.weight", "hidden_norm.weight", "norm.weight"])


def test_the_published_27b_drafter_has_1_73_billion_parameters() -> None:
    config = DrafterConfig(
        vocab_size=248_320,
        hidden_size=5120,
        intermediate_size=17_408,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        num_hidden_layers=5,
        block_size=16,
        mask_token_id=248_070,
        target_layer_ids=(1, 16, 31, 46, 61),
        num_target_layers=64,
        layer_types=(*("sliding_attention",) * 4, "full_attention"),
        sliding_window=2048,
    )
    with torch.device("meta"):
        drafter = Drafter(config)
    assert len(drafter.state_dict()) == 58
    assert round(sum(p.numel() for p in drafter.parameters()) / 1e9, 2) == 1.73


def test_initial_weights_depend_on_the_seed_alone(config: DrafterConfig) -> None:
    one, same, other = Drafter(config), Drafter(config), Drafter(config)
    one.initialize(3)
    torch.rand(5)
    same.initialize(3)
    other.initialize(4)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), same.parameters(), strict=True))
    assert not torch.equal(one.fc.weight, other.fc.weight)
    assert all(p.eq(1).all() for name, p in one.named_parameters() if name.endswith("norm.weight"))


def test_a_block_is_its_anchor_and_mask_tokens(config: DrafterConfig) -> None:
    embedding = torch.randn(config.vocab_size, config.hidden_size)
    inputs = embed_blocks(embedding, torch.tensor([[7, 9]]), config, 3)
    expected = embedding[torch.tensor([7, 49, 49, 9, 49, 49])]
    assert torch.equal(inputs, expected[None])
