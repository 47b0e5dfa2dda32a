"""Where drafting stops: the proposals that fell, and what the target said in their place, as text."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tokenizers import Tokenizer

from dflash_core.evaluation.decode import Generation
from dflash_core.evaluation.prompts import Prompt
from dflash_core.records import StopExample

EXAMPLES = 8
STOPS = 12
BEFORE_TOKENS = 32


class Stop(NamedTuple):
    """A fallen proposal in a generation."""

    anchor: int
    """Index of the block's slot 0 in the generation's tokens."""
    accepted: int
    refused: int
    said: int


def stops_of(generation: Generation) -> Iterator[Stop]:
    """Every step of which a proposal fell, but for what the end of the output has cut off."""
    anchor = 0
    for step in generation.steps:
        at = anchor + step.accepted + 1
        if step.refused is not None and at < len(generation.tokens):
            yield Stop(anchor, step.accepted, step.refused, generation.tokens[at])
        anchor = at


def frequent_stops(tokenizer: Tokenizer, generations: Sequence[Generation]) -> dict[str, int]:
    """Tokens that the target said where a proposal fell, the most frequent first."""
    counted = Counter(stop.said for generation in generations for stop in stops_of(generation))
    best = sorted(counted.items(), key=lambda item: (-item[1], item[0]))[:STOPS]
    return {_text(tokenizer, [token]): count for token, count in best}


def stop_examples(
    tokenizer: Tokenizer, prompts: Sequence[Prompt], generations: Sequence[Generation]
) -> tuple[StopExample, ...]:
    """Of each of the first prompts the step that accepted least."""
    examples: list[StopExample] = []
    for prompt, generation in zip(prompts, generations, strict=True):
        worst = min(stops_of(generation), key=lambda stop: stop.accepted, default=None)
        if worst is None or len(examples) == EXAMPLES:
            continue
        known = [*prompt.ids, *generation.tokens[: worst.anchor + 1]]
        accepted = generation.tokens[worst.anchor + 1 : worst.anchor + 1 + worst.accepted]
        examples.append(
            StopExample(
                file=prompt.file,
                row_id=prompt.row_id,
                before=_text(tokenizer, known[-BEFORE_TOKENS:]),
                accepted=_text(tokenizer, accepted),
                refused=_text(tokenizer, [worst.refused]),
                said=_text(tokenizer, [worst.said]),
            )
        )
    return tuple(examples)


def _text(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(ids), skip_special_tokens=False))
