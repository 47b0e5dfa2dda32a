"""Answers: what a server gave, what it is worth, and what is asked next.

`Plan` is the recipe's decision in one place: the first request of a prompt, whether an answer is good enough, and the
request that follows a bad one. Every request has a key of its own (prompt, model, sampling, seed, attempt), so that an
answer in the ledger is used exactly where the same thing would be asked again.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import orjson

from dflash_core import GENERATION_VERSION
from dflash_core.completions.completion import FinishReason, Json, Rejected
from dflash_core.completions.normalize import split_reasoning
from dflash_core.completions.repetition import repetition_loops
from dflash_core.errors import RecipeError
from dflash_core.generation.prompt_file import Prompt, api_messages
from dflash_core.recipe import GenerationSettings, Recipe, SamplingSettings, TemplateOption, settings_hash
from dflash_core.records import Record

AnswerOutcome = Literal["good", "truncated", "empty", "loop"]
"""Of an answer. A prompt without one is "refused" (by a server, for good) or "unanswered" (it never worked)."""
MAX_WORD = 24
"""Text of longer words on average is in a script without spaces, and is looked at by characters."""


class Answer(Record):
    """One answer as a server gave it."""

    content: str
    reasoning: str | None = None
    tool_calls: tuple[dict[str, Json], ...] = ()
    finish_reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    prompt_token_ids: tuple[int, ...] | None = None
    completion_token_ids: tuple[int, ...] | None = None
    model: str
    server: str
    seconds: float

    @property
    def has_text(self) -> bool:
        """Whether it says anything beyond its thought, in whichever field that is."""
        try:
            _, text = split_reasoning(self.reasoning, self.content, self.finish_reason)
        except Rejected:
            return False  # an unclosed thought that stopped by itself
        return bool(text.strip())

    @property
    def cut_in_thought(self) -> bool:
        """Ended by the token limit before its answer began."""
        return self.finish_reason == "length" and not self.has_text


@dataclass(frozen=True)
class Request:
    """One request for one prompt."""

    key: str
    """32 hexadecimal digits: a hash of everything that decides the answer."""
    attempt: int
    max_tokens: int
    seed: int | None


@dataclass(frozen=True)
class Plan:
    """What the recipe says about requests and answers."""

    generation: GenerationSettings
    template_options: dict[str, TemplateOption]
    request_hash: str
    """16 hexadecimal digits over all but the prompt that decides an answer."""
    policy_hash: str
    """16 hexadecimal digits over what decides which answers are kept."""

    def first(self, prompt: Prompt) -> Request:
        """What is asked first."""
        return self._request(prompt, 0, self.generation.sampling.max_tokens)

    def next(self, prompt: Prompt, asked: Request, outcome: AnswerOutcome) -> Request | None:
        """What is asked after this answer; None: nothing more."""
        rules = self.generation.outcomes
        if self.policy(outcome) != "retry" or asked.attempt >= rules.retries:
            return None
        grows = rules.more_tokens if outcome == "truncated" else 1.0
        return self._request(prompt, asked.attempt + 1, int(asked.max_tokens * grows))

    def policy(self, outcome: AnswerOutcome) -> Literal["keep", "retry", "drop"]:
        """What becomes of an answer of this kind; "retry" with no attempt left means drop."""
        if outcome == "good":
            return "keep"
        rules = self.generation.outcomes
        return {"truncated": rules.truncated, "empty": rules.empty, "loop": rules.loop}[outcome]

    def _request(self, prompt: Prompt, attempt: int, max_tokens: int) -> Request:
        parts = orjson.dumps([self.request_hash, prompt.content_hash, attempt, max_tokens])
        key = hashlib.sha256(parts).hexdigest()[:32]
        return Request(
            key, attempt, max_tokens, int(key[:8], 16) & 0x7FFFFFFF if self.generation.sampling.seed else None
        )


def generation_of(recipe: Recipe) -> GenerationSettings:
    """The recipe's section.

    Raises:
        RecipeError: it has none.
    """
    if recipe.generation is None:
        raise RecipeError(f"recipe {recipe.name!r} has no [generation]; add prompts, servers and model to generate")
    return recipe.generation


def plan_of(recipe: Recipe) -> Plan:
    """What the recipe says about requests and answers.

    Raises:
        RecipeError: it has no [generation].
    """
    generation, settings = generation_of(recipe), recipe.settings_for("answers")
    if not generation.sampling.seed:
        settings.pop("seed")  # it is not sent
    return Plan(
        generation,
        recipe.tokenization.template_options,
        settings_hash(settings, {"code": GENERATION_VERSION})[:16],
        settings_hash(recipe.settings_for("kept answers"), {"code": GENERATION_VERSION})[:16],
    )


def sampling_fields(sampling: SamplingSettings) -> dict[str, Json]:
    """The sampling parameters as they are sent, seed left out."""
    return sampling.model_dump(exclude={"seed"}, exclude_none=True)


def outcome_of(answer: Answer) -> AnswerOutcome:
    """What an answer is worth. A loop that ran into the token limit is a loop."""
    if ends_in_loop(answer):
        return "loop"
    if answer.finish_reason == "length":
        return "truncated"
    return "good" if answer.has_text or answer.tool_calls else "empty"


def ends_in_loop(answer: Answer) -> bool:
    """Whether it ends with the same few tokens over and over; words or characters where there are no token ids."""
    units: Sequence[object] | None = answer.completion_token_ids
    if units is None:
        text = f"{answer.reasoning or ''}\n{answer.content}".strip()
        words = text.split()
        units = words if len(text) <= MAX_WORD * max(1, len(words)) else text
    numbers: dict[object, int] = {}
    ids = np.array([numbers.setdefault(unit, len(numbers)) for unit in units], np.uint32)
    return bool(repetition_loops(ids, np.zeros(1, np.int64), np.array([len(ids)]))[0])


def output_row(prompt: Prompt, answer: Answer, request: Request, plan: Plan, prompt_file: str) -> bytes:
    """The line that is written for a kept answer: an accepted completion, with all that it came from."""
    said: dict[str, Json] = {"role": "assistant", "content": answer.content}
    if answer.reasoning is not None:
        said["reasoning_content"] = answer.reasoning
    if answer.tool_calls:
        said["tool_calls"] = answer.tool_calls
    row: dict[str, Json] = {
        "id": prompt.row_id,
        "messages": [*api_messages(prompt.messages), said],
        "finish_reason": answer.finish_reason,
        "usage": {
            "prompt_tokens": answer.prompt_tokens,
            "completion_tokens": answer.completion_tokens,
            "total_tokens": answer.prompt_tokens + answer.completion_tokens,
        },
    }
    if prompt.tools:
        row["tools"] = prompt.tools
    if answer.prompt_token_ids is not None and answer.completion_token_ids is not None:
        row |= {"prompt_token_ids": answer.prompt_token_ids, "completion_token_ids": answer.completion_token_ids}
    sampling = {**sampling_fields(plan.generation.sampling), "max_tokens": request.max_tokens}
    row |= {
        "model": answer.model,
        "server": answer.server,
        "sampling": sampling | {"chat_template_kwargs": plan.template_options},
        "seed": request.seed,
        "prompt_file": prompt_file,
        "prompt_line": prompt.line,
    }
    return json.dumps(row, ensure_ascii=False).encode() + b"\n"
