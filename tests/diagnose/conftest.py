"""A tiny target, its own answers to a few prompts, and drafters that know them by heart, rightly or with a mistake."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from dflash_core.decoding.decode import DecodingOptions, decode
from dflash_core.decoding.drafts import NoDraft
from dflash_core.diagnose.assumption import Assumption, RecordedAnswer, block_states, prepare_texts
from dflash_core.diagnose.causes import Evidence, Facts
from dflash_core.drafter.config import DrafterConfig
from dflash_core.drafter.model import Drafter
from dflash_core.drafter.objective import SlotWeights, block_loss
from dflash_core.target.cached import CachedTarget
from tests.training.conftest import make_recipe, target_folder

__all__ = ["make_recipe", "target_folder"]

VOCABULARY, MASK, K = 64, 63, 4
ENDING, OTHER_ENDING = (60, 61), (60, 62)
"""How a prompt ends with and without thinking."""
ANSWER = 40
STEPS = 180
ANCHOR_DRAWS = 6
"""So that nearly every place of an answer is learnt, as decoding comes to any."""

torch.set_num_threads(1)


@dataclass(frozen=True)
class World:
    """What all the plants share."""

    target: CachedTarget
    config: DrafterConfig
    texts: tuple[RecordedAnswer, ...]
    """On-policy: the target's own answers."""
    drafter: Drafter
    """Healthy."""

    def train(self, assumption: Assumption, texts: Sequence[RecordedAnswer], steps: int) -> Drafter:
        """Learn `texts` by heart under an assumption."""
        return train(self.target, assumption, texts, steps)

    def evidence(self, drafter: Drafter, texts: Sequence[RecordedAnswer] | None = None, **facts: Any) -> Evidence:
        """What there is about a drafter as it would be served."""
        known: dict[str, Any] = {
            "mask_ids": (3, 7, MASK, 0),
            "thetas": (1e2, 1e4, 1e6),
            "window": 16,
            "ending": ENDING,
        }
        used = self.texts if texts is None else texts
        reach = max(len(text.ids) for text in used)
        return Evidence(drafter, self.target, used, reach, ANSWER, Facts(**{**known, **facts}))


def train(target: CachedTarget, assumption: Assumption, texts: Sequence[RecordedAnswer], steps: int) -> Drafter:
    drafter = Drafter(assumption.config)
    drafter.initialize(0)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=4e-3, weight_decay=0.0, fused=True)
    draws = [prepare_texts([replace(text, name=f"{text.name}, {n}") for text in texts], K) for n in range(ANCHOR_DRAWS)]
    outputs = target.features(draws[0].batch.ids, assumption.config.target_layer_ids)
    head = target.lm_head if assumption.lm_head is None else assumption.lm_head
    for step in range(steps):
        prepared = draws[step % ANCHOR_DRAWS]
        optimizer.param_groups[0]["lr"] = 4e-3 * min(1.0, 2 * (1 - step / steps))
        hidden = block_states(drafter, target, prepared, outputs, assumption)
        sums = block_loss(hidden, head, prepared.targets, SlotWeights("decay", 4.0))
        optimizer.zero_grad()
        (sums.loss / sums.weight).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return drafter.eval()


def answers(target: CachedTarget, prompts: Sequence[tuple[int, ...]], length: int) -> tuple[RecordedAnswer, ...]:
    """What the target says."""
    made = decode(target, NoDraft(), prompts, DecodingOptions(length, frozenset()), batch=8)
    return tuple(
        RecordedAnswer(str(i), (*p, *g.tokens), len(p)) for i, (p, g) in enumerate(zip(prompts, made, strict=True))
    )


@pytest.fixture(scope="session")
def world() -> World:
    """Eight prompts, an untied target of four layers, a healthy drafter."""
    torch.manual_seed(0)
    shape = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        eos_token_id=None,
        initializer_range=0.2,
        tie_word_embeddings=False,
    )
    target = CachedTarget(Qwen3ForCausalLM(shape).requires_grad_(False), (0, 2))
    config = DrafterConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_hidden_layers=2,
        block_size=K,
        mask_token_id=MASK,
        target_layer_ids=(0, 2),
        num_target_layers=4,
        layer_types=("full_attention", "full_attention"),
        rope_theta=10_000.0,
    )
    generator = torch.Generator().manual_seed(1)
    prompts = [(*torch.randint(0, 59, (6,), generator=generator).tolist(), *ENDING) for _ in range(8)]
    texts = answers(target, prompts, ANSWER)
    return World(target, config, texts, train(target, Assumption("as it is", config), texts, STEPS))


@pytest.fixture
def as_configured(world: World) -> Callable[..., Drafter]:
    """The healthy weights under a config with some values replaced, as a damaged folder would hold them."""

    def make(**changes: Any) -> Drafter:
        drafter = Drafter(replace(world.config, **changes))
        drafter.load_state_dict(world.drafter.state_dict())
        return drafter.eval()

    return make
