"""Drafting changes the speed of the target's output, never the output; and the counts are those of serving engines."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor

from dflash_core.decoding.acceptance import acceptance_length
from dflash_core.decoding.decode import (
    DecodedAnswer,
    DecodingOptions,
    VerificationStep,
    decode,
    generate,
    generate_plain,
    verify,
)
from dflash_core.decoding.drafts import Draft, DrafterDraft, NgramDraft, NgramModel, NoDraft, Proposal
from dflash_core.drafter.model import Drafter
from dflash_core.target.cached import CachedTarget

MakeTarget = Callable[..., CachedTarget]
PROMPT = list(range(5, 15))
PROMPTS = [PROMPT, [9, 4, 33], list(range(40, 62)), [50, 2], [1, 1, 7, 7, 30, 12]]
GREEDY = DecodingOptions(44, frozenset())
FAMILIES = ["llama", "qwen2", "qwen3", "qwen3_5", "sliding"]


class Prophet:
    """Knows the outputs; errs at every `period`-th token, so that every number of accepted drafts occurs."""

    def __init__(self, outputs: dict[tuple[int, ...], tuple[int, ...]], block_size: int, period: int) -> None:
        """`outputs`: by prompt."""
        self.block_size, self._outputs, self._period = block_size, outputs, period
        self.features: dict[tuple[int, ...], list[Tensor]] = {}
        self.begin()

    def begin(self) -> None:
        self._rows: list[tuple[tuple[int, ...], int]] = []

    def admit(self, tokens: Tensor, features: Tensor) -> None:
        prompt = tuple(tokens[0].tolist())
        self._rows.append((prompt, 0))
        self.features[prompt] = [features[0]]

    def observe(self, tokens: Tensor, features: Tensor, counts: Sequence[int]) -> None:
        for (prompt, _), new, count in zip(self._rows, features, counts, strict=True):
            self.features[prompt].append(new[:count])
        self._rows = [(prompt, seen + count) for (prompt, seen), count in zip(self._rows, counts, strict=True)]

    def propose(self, anchors: Sequence[int], generators: Sequence[torch.Generator | None]) -> Proposal:
        rows = zip(self._rows, anchors, strict=True)
        return Proposal(torch.tensor([self._ahead(prompt, at, anchor) for (prompt, at), anchor in rows]), None)

    def select(self, rows: Sequence[int]) -> None:
        self._rows = [self._rows[row] for row in rows]

    def _ahead(self, prompt: tuple[int, ...], at: int, anchor: int) -> list[int]:
        output = self._outputs[prompt]
        assert anchor == output[at]
        ahead = [*output[at + 1 :], *[0] * self.block_size][: self.block_size - 1]
        return [(t + 1) % 64 if (at + i) % self._period == self._period - 1 else t for i, t in enumerate(ahead)]


def without_a_cache(target: CachedTarget, prompt: Sequence[int], count: int) -> tuple[int, ...]:
    """The target's greedy output, the whole sequence read again for every token."""
    ids = list(prompt)
    for _ in range(count):
        with torch.no_grad():
            ids.append(int(target.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return tuple(ids[len(prompt) :])


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_output_is_the_targets_own_token_by_token(
    make_target: MakeTarget, drafter: Drafter, family: str
) -> None:
    target = make_target(family)
    plain = generate_plain(target, PROMPT, GREEDY)
    assert len(set(plain.tokens)) > 8
    assert plain.tokens == without_a_cache(target, PROMPT, 44)
    counted = NgramModel(3, [np.array([*PROMPT, *plain.tokens], np.int32)])
    drafts: list[Draft] = [
        DrafterDraft(drafter, target.embedding, target.lm_head),
        DrafterDraft(drafter, target.embedding, target.lm_head, block_size=3),
        NgramDraft(counted, 8),
        Prophet({tuple(PROMPT): plain.tokens}, 8, 5),
        Prophet({tuple(PROMPT): plain.tokens}, 4, 100),
    ]
    for draft in drafts:
        drafted = generate(target, draft, PROMPT, GREEDY)
        assert drafted.tokens == plain.tokens, draft


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("batch", [1, 3])
def test_features_handed_to_the_draft_are_the_outputs_of_the_layers(
    make_target: MakeTarget, family: str, batch: int
) -> None:
    target = make_target(family)
    outputs = {tuple(p): generate_plain(target, p, GREEDY).tokens for p in PROMPTS[:batch]}
    prophet = Prophet(outputs, 6, 4)
    decode(target, prophet, PROMPTS[:batch], GREEDY, batch=batch)
    for prompt, output in outputs.items():
        seen = torch.cat(prophet.features[prompt])
        ids = torch.tensor([[*prompt, *output]])[:, : len(seen)]
        with torch.no_grad():
            states = target.model(input_ids=ids, output_hidden_states=True, use_cache=False).hidden_states
        expected = torch.cat((states[0 + 1][0], states[2 + 1][0]), -1)
        # Linear attention is computed in chunks, in fp32 whatever the model is in: other cuts, other rounding.
        bound = 2e-3 if family == "qwen3_5" else 1e-4
        torch.testing.assert_close(seen, expected[: len(seen)], rtol=0, atol=bound)


@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_decoded_together_give_what_each_gives_alone(
    make_target: MakeTarget, drafter: Drafter, family: str
) -> None:
    """More prompts than places, of unequal length, ending at unequal times: rows come, go and are never mixed up."""
    target = make_target(family)
    plain = [generate_plain(target, prompt, DecodingOptions(24, frozenset())) for prompt in PROMPTS]
    stop = plain[1].tokens[15]
    options = DecodingOptions(24, frozenset({stop}))
    outputs = decode(target, NoDraft(), PROMPTS, options, batch=3)
    assert [o.tokens for o in outputs] == [generate_plain(target, prompt, options).tokens for prompt in PROMPTS]
    assert len({len(output.tokens) for output in outputs}) > 1
    counted = NgramModel(3, [np.array([*p, *o.tokens], np.int32) for p, o in zip(PROMPTS, plain, strict=True)])
    drafts: list[Draft] = [
        DrafterDraft(drafter, target.embedding, target.lm_head),
        NgramDraft(counted, 5),
        Prophet({tuple(p): o.tokens for p, o in zip(PROMPTS, plain, strict=True)}, 8, 5),
    ]
    for draft in drafts:
        alone = [generate(target, draft, prompt, options) for prompt in PROMPTS]
        seen: list[int] = []
        together = decode(target, draft, PROMPTS, options, batch=3, on_done=seen.append)
        assert [g.tokens for g in together] == [o.tokens for o in outputs] == [g.tokens for g in alone], draft
        assert [g.steps for g in together] == [g.steps for g in alone], draft
        assert seen == sorted(seen)
        assert seen[-1] == len(PROMPTS)


def test_a_prompts_sample_does_not_depend_on_its_neighbours(make_target: MakeTarget, drafter: Drafter) -> None:
    target = make_target("qwen3")
    draft = DrafterDraft(drafter, target.embedding, target.lm_head, temperature=1.0)
    options = DecodingOptions(24, frozenset({7}), 1.0, 3)
    alone, together = (decode(target, draft, PROMPTS, options, batch=batch) for batch in (1, 3))
    assert [g.tokens for g in alone] == [g.tokens for g in together]
    assert len({g.tokens for g in alone}) == len(PROMPTS)


def test_the_counts_are_of_verification_steps(make_target: MakeTarget) -> None:
    target = make_target("qwen3")
    plain = generate_plain(target, PROMPT, DecodingOptions(61, frozenset()))
    perfect = generate(
        target, Prophet({tuple(PROMPT): plain.tokens}, 4, 1000), PROMPT, DecodingOptions(61, frozenset())
    )
    # The first token comes from the prompt; then 4 tokens a step.
    assert perfect.histogram == (0, 0, 0, 15)
    assert perfect.steps == (VerificationStep(3, None),) * 15
    assert acceptance_length(perfect.histogram) == 4
    hopeless = generate(target, Prophet({tuple(PROMPT): plain.tokens}, 4, 1), PROMPT, DecodingOptions(61, frozenset()))
    assert hopeless.histogram == (60, 0, 0, 0)
    assert acceptance_length(hopeless.histogram) == 1
    assert [step.refused for step in hopeless.steps] == [(token + 1) % 64 for token in plain.tokens[1:]]


def test_output_ends_with_the_first_stop_token_or_at_the_limit(make_target: MakeTarget) -> None:
    target = make_target("qwen3")
    plain = generate_plain(target, PROMPT, GREEDY)
    for at in (0, 1, 5, 6, 7, 30):
        stop = plain.tokens[at]
        options = DecodingOptions(60, frozenset({stop}))
        expected = plain.tokens[: plain.tokens.index(stop) + 1]
        assert generate_plain(target, PROMPT, options).tokens == expected
        assert generate(target, Prophet({tuple(PROMPT): plain.tokens}, 8, 100), PROMPT, options).tokens == expected
    for limit in (1, 2, 9):
        drafted = generate(
            target, Prophet({tuple(PROMPT): plain.tokens}, 8, 100), PROMPT, DecodingOptions(limit, frozenset())
        )
        assert drafted.tokens == plain.tokens[:limit]


def test_a_block_larger_than_trained_is_refused(make_target: MakeTarget, drafter: Drafter) -> None:
    target = make_target("qwen3")
    with pytest.raises(ValueError, match="block size 9 exceeds the trained 8"):
        DrafterDraft(drafter, target.embedding, target.lm_head, block_size=9)


def chi_square(counts: dict[tuple[int, ...], int], expected: dict[tuple[int, ...], float]) -> tuple[float, float]:
    """The statistic over cells of at least five expected counts (the rest in one), and its 99.9 % quantile.

    The quantile is the approximation of Wilson and Hilferty (1931).
    """
    total = sum(counts.values())
    large = [cell for cell, share in expected.items() if share * total >= 5]
    pairs = [(counts.get(cell, 0), expected[cell] * total) for cell in large]
    rest = total - sum(e for _, e in pairs)
    if rest >= 5:
        pairs.append((total - sum(o for o, _ in pairs), rest))
    freedom = len(pairs) - 1
    quantile = freedom * (1 - 2 / (9 * freedom) + 3.09 * (2 / (9 * freedom)) ** 0.5) ** 3
    return sum((o - e) ** 2 / e for o, e in pairs), quantile


@pytest.mark.parametrize("certain", [False, True], ids=["drawn proposals", "certain proposals"])
def test_rejection_sampling_keeps_the_distribution(certain: bool) -> None:
    """The first two tokens of verify must be distributed as the target alone would draw them."""
    torch.manual_seed(1)
    logits, q = 2 * torch.randn(3, 5), torch.softmax(2 * torch.randn(2, 5), -1)
    temperature = 0.7
    p = torch.softmax(logits / temperature, -1)
    generator = torch.Generator().manual_seed(0)
    counts: Counter[tuple[int, ...]] = Counter()
    first: Counter[tuple[int, ...]] = Counter()
    for _ in range(12_000):
        tokens = torch.tensor([1, 3]) if certain else torch.multinomial(q, 1, generator=generator)[:, 0]
        accepted, following = verify(Proposal(tokens, None if certain else q), logits, temperature, generator)
        out = [*tokens[:accepted].tolist(), following]
        first[(out[0],)] += 1
        if len(out) >= 2:
            counts[tuple(out[:2])] += 1
    statistic, quantile = chi_square(first, {(a,): float(p[0, a]) for a in range(5)})
    assert statistic < quantile
    # Given that slot 1 stood, slot 2 must follow p_2 whatever slot 1 was.
    second: dict[tuple[int, ...], int] = {(b,): sum(c for (_, t), c in counts.items() if t == b) for b in range(5)}
    statistic, quantile = chi_square(second, {(b,): float(p[1, b]) for b in range(5)})
    assert statistic < quantile


def test_sampled_output_has_the_targets_distribution(make_target: MakeTarget, drafter: Drafter) -> None:
    """Second and third token of a target with six tokens, many rows at a time, against their exact probabilities."""
    V, prompt = 6, [3, 1]
    target = make_target("qwen3", V)
    small = Drafter(replace(drafter.config, vocab_size=V, mask_token_id=0))
    small.load_state_dict(drafter.state_dict())
    draft = DrafterDraft(small, target.embedding, target.lm_head, block_size=3, temperature=1.0)
    counts: Counter[tuple[int, ...]] = Counter()
    histogram = [0, 0, 0]
    for drafted in decode(target, draft, [prompt] * 600, DecodingOptions(3, frozenset(), 1.0), batch=50):
        counts[drafted.tokens[1:]] += 1
        histogram = [a + b for a, b in zip(histogram, drafted.histogram, strict=True)]
    assert min(histogram) > 30
    ids = torch.tensor([[*prompt, a, b] for a, b in product(range(V), repeat=2)])
    with torch.no_grad():
        p = torch.softmax(target.model(input_ids=ids, use_cache=False).logits[:, 1:], -1).view(V, V, 3, V)
    joint = torch.einsum("a,ab,abc->bc", p[0, 0, 0], p[:, 0, 1], p[:, :, 2])
    expected: dict[tuple[int, ...], float] = {(b, c): float(joint[b, c]) for b, c in product(range(V), repeat=2)}
    statistic, quantile = chi_square(counts, expected)
    assert statistic < quantile


def test_equal_seeds_give_equal_samples(make_target: MakeTarget, drafter: Drafter) -> None:
    target = make_target("qwen3")
    draft = DrafterDraft(drafter, target.embedding, target.lm_head, temperature=1.0)
    outputs: list[DecodedAnswer] = [
        generate(target, draft, PROMPT, DecodingOptions(20, frozenset(), 1.0, seed)) for seed in (1, 1, 2)
    ]
    assert outputs[0].tokens == outputs[1].tokens != outputs[2].tokens
