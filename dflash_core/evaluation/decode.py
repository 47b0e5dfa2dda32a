"""Draft-and-verify decoding: propose K-1 tokens, score them in one pass of the target, keep what it would have said.

The trade-off: one sequence at a time, so that counts and times are those of a single reader, and the loop can be read.
What the target says is unchanged: at temperature 0 token by token, above it in distribution.
Shapes: K block size, V vocabulary.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_core.evaluation.drafts import Draft, Proposal
from dflash_core.evaluation.target import VerifyingTarget


@dataclass(frozen=True)
class Sampling:
    """When to stop and how to draw."""

    max_new_tokens: int
    stop_tokens: frozenset[int]
    temperature: float = 0.0
    seed: int = 0

    def generator(self, device: torch.device) -> torch.Generator | None:
        """A fresh source of randomness; None at temperature 0."""
        return torch.Generator(device).manual_seed(self.seed) if self.temperature > 0 else None


@dataclass(frozen=True)
class Generation:
    """One decoded sequence."""

    tokens: tuple[int, ...]
    """New tokens, the stop token included."""
    histogram: tuple[int, ...]
    """[K]: verification steps that accepted 0, 1, ... K-1 proposals. Counted before a stop token cuts the output, as
    serving engines do. Empty without a draft."""
    seconds: float
    """Wall time after the prompt was read."""


def verify(
    proposal: Proposal, logits: Tensor, temperature: float, generator: torch.Generator | None
) -> tuple[int, int]:
    """How many proposals stand, and the target's own next token after them.

    With p_i the target's distribution after the anchor and i-1 proposals, q_i that of the draft:
    T = 0: d_i stands iff it is argmax p_i.
    T > 0: d_i stands with probability min(1, p_i(d_i) / q_i(d_i)); at the first that falls, the next token is drawn
    from max(p_i - q_i, 0) / Z. Then P(x) = q(x) min(1, p(x)/q(x)) + P(fall) max(p(x) - q(x), 0) / Z = p(x), because
    P(fall) = 1 - sum_x min(p, q) = sum_x max(p - q, 0) = Z. (Leviathan et al. 2023, arXiv 2211.17192.)
    If all stand, the next token comes from p_K.

    Args:
        proposal: d_1 .. d_{K-1} and the q_i, a missing q_i being certain of d_i.
        logits: [K, V] the target's, after the anchor and after each proposal.
        temperature: of the target.
        generator: given iff temperature > 0.
    """
    drafts, count = proposal.tokens, len(proposal.tokens)
    if generator is None:
        said = logits.argmax(-1)
        accepted = int((said[:count] == drafts).long().cumprod(0).sum())
        return accepted, int(said[accepted])
    p = torch.softmax(logits.float() / temperature, -1)
    q = proposal.probabilities
    if q is None:
        q = torch.nn.functional.one_hot(drafts, p.shape[-1]).to(p.dtype)
    slots = torch.arange(count, device=p.device)
    # u < p/q without dividing: u * q < p, right for q = 0, too.
    stands = torch.rand(count, generator=generator, device=p.device) * q[slots, drafts] < p[slots, drafts]
    accepted = int(stands.long().cumprod(0).sum())
    rest = p[accepted] if accepted == count else (p[accepted] - q[accepted]).clamp(min=0)
    if not rest.any():  # p and q differ by rounding only
        rest = p[accepted]
    return accepted, int(torch.multinomial(rest, 1, generator=generator))


def generate(target: VerifyingTarget, draft: Draft, prompt: Sequence[int], sampling: Sampling) -> Generation:
    """Decode with a draft; `prompt` holds at least one token."""
    device, K = target.device, draft.block_size
    generator = sampling.generator(device)
    target.begin()
    draft.begin()
    ids = torch.tensor([list(prompt)], device=device)
    logits, features = target.prefill(ids)
    draft.observe(ids, features)
    out = [_pick(logits[-1], sampling.temperature, generator)]
    histogram = [0] * K
    began = time.perf_counter()
    while not _finished(out, sampling):
        proposal = draft.propose(out[-1], generator)
        proposal = Proposal(proposal.tokens.to(device), proposal.probabilities)
        block = torch.cat((torch.tensor([out[-1]], device=device), proposal.tokens))[None]
        logits, features = target.score(block)
        accepted, following = verify(proposal, logits, sampling.temperature, generator)
        target.keep(accepted + 1)
        draft.observe(block[:, : accepted + 1], features[:, : accepted + 1])
        histogram[accepted] += 1
        out += [*proposal.tokens[:accepted].tolist(), following]
        out = _cut(out, sampling)
    return Generation(tuple(out), tuple(histogram), time.perf_counter() - began)


def generate_plain(target: VerifyingTarget, prompt: Sequence[int], sampling: Sampling) -> Generation:
    """Decode token by token, without a draft."""
    generator = sampling.generator(target.device)
    target.begin()
    logits, _ = target.prefill(torch.tensor([list(prompt)], device=target.device))
    out = [_pick(logits[-1], sampling.temperature, generator)]
    began = time.perf_counter()
    while not _finished(out, sampling):
        logits, _ = target.prefill(torch.tensor([[out[-1]]], device=target.device))
        out.append(_pick(logits[-1], sampling.temperature, generator))
    return Generation(tuple(out), (), time.perf_counter() - began)


def _pick(logits: Tensor, temperature: float, generator: torch.Generator | None) -> int:
    if generator is None:
        return int(logits.argmax())
    return int(torch.multinomial(torch.softmax(logits.float() / temperature, -1), 1, generator=generator))


def _finished(out: Sequence[int], sampling: Sampling) -> bool:
    return len(out) >= sampling.max_new_tokens or out[-1] in sampling.stop_tokens


def _cut(out: list[int], sampling: Sampling) -> list[int]:
    """End after the first stop token and at the limit."""
    end = next((i + 1 for i, token in enumerate(out) if token in sampling.stop_tokens), len(out))
    return out[: min(end, sampling.max_new_tokens)]
