"""Before a night's work: is every server there, does it know the model, render prompts as we do, and have the room?

The decisive question is the template's: a server that renders chats differently from the recipe's tokenizer gives
completions which the drafter is then trained on with other token ids. Ids are compared where the server returns them,
else their number.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from dflash_core.completions.completion import Json, Message, Rejected
from dflash_core.generation.answers import Answer, Plan, Request
from dflash_core.generation.client import ServerConnection, ServerRefuses, Trouble
from dflash_core.generation.prompt_file import Prompt

PromptIds = Callable[[Prompt], Sequence[int]]
"""A prompt's token ids as the recipe's tokenizer and template give them."""

PROBE = Prompt(
    0, "probe", (Message("user", "What is 17 plus 25?\nÉcris: “été”, 東京.  Two spaces, then\ttab."),), (), "probe"
)
ROOM_FIELDS = ("max_model_len", "max_total_tokens", "context_length", "context_window")
SHOWN = 8


async def check_server(
    connection: ServerConnection, plan: Plan, prompt_ids: PromptIds, first: Prompt, target: Path
) -> list[str]:
    """Everything that can be known before the first prompt; what could not be checked, a sentence each.

    Args:
        connection: to the server.
        plan: the recipe's.
        prompt_ids: what the server should make of a prompt.
        first: the first real prompt; it is compared, too.
        target: folder with config.json, for the context length where the server does not tell.

    Raises:
        ServerRefuses: one sentence about what does not fit.
    """
    url, unchecked = connection.url, []
    probe_ids, first_ids = _expected(prompt_ids, PROBE), _expected(prompt_ids, first)
    try:
        models = {str(entry.get("id")): entry for entry in await connection.models()}
        if plan.generation.model not in models:
            raise ServerRefuses(
                f"{url} does not serve {plan.generation.model!r} but {', '.join(sorted(models)) or 'nothing'}; "
                "correct generation.model"
            )
        _check_room(url, models[plan.generation.model], plan, len(probe_ids or ()), target)
        if probe_ids is None:
            unchecked.append(f"{url}: the recipe's chat template refuses a lone question, so no probe was compared")
        else:
            unchecked += _compare(url, await _ask(connection, PROBE, plan), probe_ids)
    except Trouble as trouble:
        raise ServerRefuses(f"{url} cannot be used: {trouble}") from None
    try:
        if first_ids is not None:
            _compare(url, await _ask(connection, first, plan), first_ids)
    except Trouble:
        first_ids = None
    if first_ids is None:
        unchecked.append(f"{url}: the first prompt is refused, so it was not compared")
    return unchecked


def _expected(prompt_ids: PromptIds, prompt: Prompt) -> Sequence[int] | None:
    """None: the template does not accept this conversation."""
    try:
        return prompt_ids(prompt)
    except Rejected:
        return None


async def _ask(connection: ServerConnection, prompt: Prompt, plan: Plan) -> Answer:
    """One token, all else as in earnest."""
    return await connection.ask(prompt, Request("", 0, 1, 0 if plan.generation.sampling.seed else None), plan)


def _compare(url: str, answer: Answer, expected: Sequence[int]) -> list[str]:
    given = answer.prompt_token_ids
    advice = "give tokenization.chat_template and template_options the server's, or start it with the recipe's"
    if given is not None:
        if list(given) == list(expected):
            return []
        same = next(
            (i for i, (a, b) in enumerate(zip(given, expected, strict=False)) if a != b), min(len(given), len(expected))
        )
        theirs, ours = list(given[same : same + SHOWN]), list(expected[same : same + SHOWN])
        raise ServerRefuses(
            f"{url} renders prompts differently: from token {same} it has {theirs} ({len(given)} in all), the recipe's "
            f"template {ours} ({len(expected)}); {advice}"
        )
    if not answer.prompt_tokens:
        return [f"{url} counts no prompt tokens, so its chat template could not be compared"]
    if answer.prompt_tokens != len(expected):
        raise ServerRefuses(
            f"{url} renders prompts differently: a prompt has {answer.prompt_tokens} tokens there and {len(expected)} "
            f"with the recipe's template; {advice}"
        )
    return []


def _check_room(url: str, model: Mapping[str, Json], plan: Plan, prompt_tokens: int, target: Path) -> None:
    told = next((model[name] for name in ROOM_FIELDS if type(model.get(name)) is int), None)
    room = told if told is not None else _positions(target)
    most = plan.generation.sampling.max_tokens
    if room is not None and prompt_tokens + most > room:
        raise ServerRefuses(
            f"{url} has room for {room} tokens{'' if told is not None else ' (by the config of the target)'}, but a "
            f"short question has {prompt_tokens} and generation.sampling.max_tokens is {most}; lower it"
        )


def _positions(target: Path) -> int | None:
    """The target's own context length, if its folder says so."""
    try:
        config = json.loads((target / "config.json").read_text(encoding="utf8"))
        found = {**config, **config.get("text_config", {})}.get("max_position_embeddings")
    except (OSError, ValueError, AttributeError, TypeError):
        return None
    return found if type(found) is int else None
