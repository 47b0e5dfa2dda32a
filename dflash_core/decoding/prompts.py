"""Held-out prompts as token ids, and the same prompts with the thought switched on or off.

The trade-off: a prompt's state is changed at its end, in ids, where the template writes the generation prompt; nothing
before is rendered again, so it works for rows whose messages nobody has any more, and is refused where a template
changes more than that.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from dflash_core.batches.order import uniform_bits
from dflash_core.batches.rows import RowStore
from dflash_core.completions.completion import Rejected
from dflash_core.errors import RecipeError, UserError
from dflash_core.recipe import TokenizationSettings
from dflash_core.tokenization.tokenizer import ChatTokenizer, read_tokenizer_files

ThinkingState = Literal["on", "off"]
STATES: tuple[ThinkingState, ThinkingState] = ("on", "off")
OPTIONS = ("enable_thinking", "thinking")
"""Names under which chat templates take the switch."""


@dataclass(frozen=True)
class HeldOutPrompt:
    """What a held-out row asks."""

    ids: tuple[int, ...]
    """Up to its first supervised token."""
    file: str
    """The row's partition."""
    row: int
    """The row's index in the row store."""
    row_id: str


def held_out_prompts(rows: RowStore, held_out: NDArray[np.int64], seed: int, count: int) -> list[HeldOutPrompt]:
    """Prompts of held-out rows, each once, the first `count` in hash order.

    Raises:
        UserError: there is none.
    """
    order = sorted(held_out.tolist(), key=lambda i: uniform_bits("evaluation prompt", seed, rows.row_ids[i]))
    prompts: dict[tuple[int, ...], HeldOutPrompt] = {}
    for index in order:
        tokens, mask = rows.row(index)
        end = int(mask.argmax())
        ids = tuple(tokens[:end].tolist())
        if end and ids not in prompts:
            prompts[ids] = HeldOutPrompt(ids, rows.partitions[int(rows.files[index])], index, rows.row_ids[index])
        if len(prompts) == count:
            break
    if not prompts:
        raise UserError(
            f"none of {len(rows)} rows is held out with a prompt before its first supervised token; "
            "raise training.held_out_share"
        )
    return list(prompts.values())


@dataclass(frozen=True)
class ThinkingSwitch:
    """How the template ends a prompt in each state."""

    endings: dict[ThinkingState, tuple[int, ...]]

    def state(self, ids: Sequence[int]) -> ThinkingState | None:
        """Which ending a prompt has; None: neither."""
        for state in sorted(STATES, key=lambda state: -len(self.endings[state])):
            ending = self.endings[state]
            if tuple(ids[-len(ending) :]) == ending:
                return state
        return None

    def switched(self, ids: Sequence[int], state: ThinkingState) -> tuple[int, ...] | None:
        """The prompt in that state; None: it has neither ending."""
        now = self.state(ids)
        return None if now is None else (*ids[: len(ids) - len(self.endings[now])], *self.endings[state])


def thinking_switch(rules: TokenizationSettings, tokenizer: ChatTokenizer) -> ThinkingSwitch | str:
    """The switch of the tokenizer's chat template, or why it has none."""
    files = read_tokenizer_files(tokenizer.path, rules)
    question = [{"role": "user", "content": "?"}]
    for option in OPTIONS:
        try:
            texts = {
                state: files.with_options({**rules.template_options, option: state == "on"}).render(
                    question, (), add_generation_prompt=True
                )
                for state in STATES
            }
            history = files.template.render(question, (), add_generation_prompt=False)
        except (RecipeError, Rejected):
            continue
        if texts["on"] == texts["off"]:
            return f"the chat template's {option} does not change the prompt"
        before = tuple(tokenizer.ids(history))
        ids = {state: tuple(tokenizer.ids(text)) for state, text in texts.items()}
        if any(whole[: len(before)] != before or len(whole) == len(before) for whole in ids.values()):
            return f"the chat template's {option} changes more than the end of the prompt"
        return ThinkingSwitch({state: whole[len(before) :] for state, whole in ids.items()})
    return f"the chat template has no option {' or '.join(OPTIONS)}"


def served_ending(tokenizer: ChatTokenizer) -> tuple[int, ...] | None:
    """How the tokenizer's template and options end a prompt; None: it does not render a question or adds nothing."""
    question = [{"role": "user", "content": "?"}]
    try:
        prompt, history = (
            tuple(tokenizer.ids(tokenizer.template.render(question, (), add_generation_prompt=prompted)))
            for prompted in (True, False)
        )
    except Rejected:
        return None
    return prompt[len(history) :] or None if prompt[: len(history)] == history else None
