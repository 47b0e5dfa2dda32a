"""Sample completions from the target, in batches with a key-value cache, in the platform's input format.

The trade-off: one plain loop over the model instead of `generate`: prompts of about equal length share a batch, a row
that has finished leaves it at once, so 2,000 completions take about a minute on one core.

Shapes: B rows still running, S tokens so far (left-padded), V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, Qwen3ForCausalLM

from demo.train_target import load_target

Row = dict[str, Any]

# transformers renamed the argument; the old name warns from 5.24 and goes in 5.40.
CACHE_ARGUMENT = "cache" if "cache" in inspect.signature(Qwen3ForCausalLM.forward).parameters else "past_key_values"


def sample_completions(
    target_dir: Path,
    questions: Sequence[tuple[str, str]],
    temperature: float = 0.7,
    max_new_tokens: int = 256,
    seed: int = 0,
    batch_size: int = 128,
    on_progress: Callable[[int, int], None] | None = None,
) -> list[Row]:
    """Answer `questions`, pairs of (id, text); returns one row a question, in their order.

    A row: {"id", "messages": [user, assistant with "reasoning_content" and "content"], "finish_reason", "usage"}.
    Temperature 0 is greedy. `finish_reason` is "length" when `<|im_end|>` did not come within `max_new_tokens`, and
    when it came inside an unclosed thought. `on_progress(done, total)` is called after every batch. The same
    arguments give the same rows on one machine; ids must be unique.
    """
    if max_new_tokens < 1 or temperature < 0 or batch_size < 1:
        raise ValueError(
            f"max_new_tokens {max_new_tokens} and batch_size {batch_size} must be >= 1, temperature {temperature} >= 0"
        )
    torch.set_num_threads(1)
    model, tokenizer = load_target(target_dir)
    prompts: list[list[int]] = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        for _, text in questions
    ]
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    rows: dict[int, Row] = {}
    for start in range(0, len(order), batch_size):
        indices = order[start : start + batch_size]
        generator = torch.Generator().manual_seed(seed * 1_000_003 + start)
        replies = _sample_batch(model, [prompts[i] for i in indices], temperature, max_new_tokens, generator)
        for i, reply in zip(indices, replies, strict=True):
            rows[i] = _row(tokenizer, questions[i], len(prompts[i]), reply)
        if on_progress is not None:
            on_progress(len(rows), len(prompts))
    return [rows[i] for i in range(len(prompts))]


@torch.inference_mode()
def _sample_batch(
    model: Any,
    prompts: Sequence[list[int]],
    temperature: float,
    max_new_tokens: int,
    generator: torch.Generator,
) -> list[list[int]]:
    """Token ids generated for each prompt, `<|im_end|>` included where it came."""
    eos, pad = model.config.eos_token_id, model.config.pad_token_id
    longest = max(map(len, prompts))
    ids_BS = torch.tensor([[pad] * (longest - len(p)) + p for p in prompts])
    mask_BS = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    positions_BS = (mask_BS.cumsum(-1) - 1).clamp(min=0)
    alive_B = torch.arange(len(prompts))
    replies: list[list[int]] = [[] for _ in prompts]
    cache = DynamicCache(config=model.config)
    for _ in range(max_new_tokens):
        logits_BV = model(
            input_ids=ids_BS,
            attention_mask=mask_BS,
            position_ids=positions_BS,
            use_cache=True,
            logits_to_keep=1,
            **{CACHE_ARGUMENT: cache},
        ).logits[:, -1]
        next_B = _pick(logits_BV, temperature, generator)
        for row, token in zip(alive_B.tolist(), next_B.tolist(), strict=True):
            replies[row].append(token)
        keep_B = torch.nonzero(next_B != eos).flatten()
        if not len(keep_B):
            break
        if len(keep_B) < len(alive_B):
            cache.batch_select_indices(keep_B)
            alive_B, next_B, mask_BS, positions_BS = (
                alive_B[keep_B],
                next_B[keep_B],
                mask_BS[keep_B],
                positions_BS[keep_B],
            )
        ids_BS = next_B[:, None]
        mask_BS = torch.cat([mask_BS, torch.ones_like(ids_BS)], dim=1)
        positions_BS = positions_BS[:, -1:] + 1
    return replies


def _pick(logits_BV: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    """One token a row: the argmax at temperature 0, else a draw by the Gumbel trick (argmax of logits plus noise)."""
    if temperature == 0:
        return logits_BV.argmax(-1)
    noise_BV = -torch.empty_like(logits_BV).exponential_(generator=generator).log()
    return (logits_BV / temperature + noise_BV).argmax(-1)


def _row(tokenizer: Any, question: tuple[str, str], prompt_tokens: int, reply: list[int]) -> Row:
    """The platform's row for one completion; a reply that never closes its thought keeps what it has."""
    row_id, text = question
    stopped = reply[-1] == tokenizer.eos_token_id
    thought, closed, content = tokenizer.decode(reply[:-1] if stopped else reply).partition("</think>")
    assistant = {
        "role": "assistant",
        "reasoning_content": thought.removeprefix("<think>").strip("\n"),
        "content": content.lstrip("\n"),
    }
    return {
        "id": row_id,
        "messages": [{"role": "user", "content": text}, assistant],
        "finish_reason": "stop" if stopped and closed else "length",
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": len(reply),
            "total_tokens": prompt_tokens + len(reply),
        },
    }
