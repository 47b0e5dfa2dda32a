"""Draft-and-verify decoding: propose K-1 tokens, score them in one pass of the target, keep what it would have said.

The trade-off: several prompts share each pass and every one keeps its own length, randomness and counts, so a prompt's
output does not depend on its neighbours (but for rounding); one prompt at a time is the same loop with one row. What
the target says is unchanged: at temperature 0 token by token, above it in distribution.
Shapes: B rows, K block size, V vocabulary.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from dflash_core.batches.order import uniform_bits
from dflash_core.decoding.drafts import Draft, NoDraft, Proposal
from dflash_core.target.cached import CachedTarget


@dataclass(frozen=True)
class DecodingOptions:
    """When to stop and how to draw."""

    max_new_tokens: int
    stop_tokens: frozenset[int]
    temperature: float = 0.0
    seed: int = 0

    def generator(self, device: torch.device, number: int) -> torch.Generator | None:
        """A fresh source of randomness for prompt `number`; None at temperature 0."""
        if self.temperature == 0:
            return None
        return torch.Generator(device).manual_seed(uniform_bits("decode", self.seed, number) >> 1)


class VerificationStep(NamedTuple):
    """One verification."""

    accepted: int
    """Proposals that stood, 0 .. K-1; counted before a stop token cuts the output, as serving engines do."""
    refused: int | None
    """The first proposal that fell; None: all stood."""


@dataclass(frozen=True)
class DecodedAnswer:
    """One decoded sequence."""

    tokens: tuple[int, ...]
    """New tokens, the stop token included."""
    block_size: int
    """K; 1 without a draft."""
    steps: tuple[VerificationStep, ...]
    """The first token is the prompt's; then each step adds its accepted proposals and one token of the target's own."""
    seconds: float
    """Wall time after the prompt was read, of each step the share of one of the rows in it."""

    @property
    def histogram(self) -> tuple[int, ...]:
        """[K]: verification steps that accepted 0, 1, ... K-1 proposals."""
        counts = [0] * self.block_size
        for step in self.steps:
            counts[step.accepted] += 1
        return tuple(counts)


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


@dataclass
class _RunningRow:
    """A sequence under way."""

    number: int
    generator: torch.Generator | None
    out: list[int]
    steps: list[VerificationStep] = field(default_factory=list)
    seconds: float = 0.0


def decode(
    target: CachedTarget,
    draft: Draft,
    prompts: Sequence[Sequence[int]],
    options: DecodingOptions,
    *,
    batch: int = 1,
    on_done: Callable[[int], None] | None = None,
) -> list[DecodedAnswer]:
    """Decode prompts of at least one token each, `batch` at a time; a finished one makes room for the next.

    Returns:
        An answer for each prompt, in their order. `on_done` is called with how many there are already.
    """
    waiting, running, done = deque(enumerate(prompts)), list[_RunningRow](), dict[int, DecodedAnswer]()
    target.begin()
    draft.begin()
    while waiting or running:
        while waiting and len(running) < batch:
            running.append(_admit(target, draft, *waiting.popleft(), options))
        going = [i for i, row in enumerate(running) if not _finished(row.out, options)]
        if len(going) == len(running):
            _step(target, draft, running, options)
            continue
        for row in running:
            if _finished(row.out, options):
                done[row.number] = DecodedAnswer(tuple(row.out), draft.block_size, tuple(row.steps), row.seconds)
        if on_done is not None:
            on_done(len(done))
        target.select(going)
        draft.select(going)
        running = [running[i] for i in going]
    return [done[number] for number in range(len(prompts))]


def generate(target: CachedTarget, draft: Draft, prompt: Sequence[int], options: DecodingOptions) -> DecodedAnswer:
    """Decode one prompt with a draft."""
    return decode(target, draft, [prompt], options)[0]


def generate_plain(target: CachedTarget, prompt: Sequence[int], options: DecodingOptions) -> DecodedAnswer:
    """Decode one prompt token by token, without a draft."""
    return generate(target, NoDraft(), prompt, options)


def _admit(
    target: CachedTarget, draft: Draft, number: int, prompt: Sequence[int], options: DecodingOptions
) -> _RunningRow:
    """Read a prompt into a new last row and pick its first token."""
    ids = torch.tensor([list(prompt)], device=target.device)
    generator = options.generator(target.device, number)
    logits, features = target.admit(ids)
    draft.admit(ids, features)
    return _RunningRow(number, generator, [_pick(logits, options.temperature, generator)])


def _step(target: CachedTarget, draft: Draft, rows: Sequence[_RunningRow], options: DecodingOptions) -> None:
    """Draft, verify and keep, once for every row."""
    began = time.perf_counter()
    anchors = [row.out[-1] for row in rows]
    proposal = draft.propose(anchors, [row.generator for row in rows])
    proposal = Proposal(proposal.tokens.to(target.device), proposal.probabilities)
    block = torch.cat((torch.tensor(anchors, device=target.device)[:, None], proposal.tokens), 1)
    logits, features = target.score(block)
    counts = []
    for index, row in enumerate(rows):
        accepted, following = verify(proposal.row(index), logits[index], options.temperature, row.generator)
        drafted = proposal.tokens[index].tolist()
        row.steps.append(VerificationStep(accepted, drafted[accepted] if accepted < len(drafted) else None))
        row.out += _cut([*drafted[:accepted], following], options.max_new_tokens - len(row.out), options.stop_tokens)
        counts.append(accepted + 1)
    target.keep(counts)
    draft.observe(block, features, counts)
    share = (time.perf_counter() - began) / len(rows)
    for row in rows:
        row.seconds += share


def _pick(logits: Tensor, temperature: float, generator: torch.Generator | None) -> int:
    if generator is None:
        return int(logits.argmax())
    return int(torch.multinomial(torch.softmax(logits.float() / temperature, -1), 1, generator=generator))


def _finished(out: Sequence[int], options: DecodingOptions) -> bool:
    return len(out) >= options.max_new_tokens or out[-1] in options.stop_tokens


def _cut(new: Sequence[int], room: int, stop_tokens: frozenset[int]) -> Sequence[int]:
    """End after the first stop token and at the limit."""
    end = next((i + 1 for i, token in enumerate(new) if token in stop_tokens), len(new))
    return new[: min(end, room)]
