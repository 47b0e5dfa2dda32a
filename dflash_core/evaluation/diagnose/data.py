"""Causes that lie in what the drafter was trained on: other prompts, other answers, or shorter ones than are served."""

import numpy as np
import torch

from dflash_core.evaluation.acceptance import Counts
from dflash_core.evaluation.diagnose.assumption import Text
from dflash_core.evaluation.diagnose.bench import Bench, Finding, acceptance, compared, nothing_to_try

AGREEMENT_ROWS = 8


def try_template(bench: Bench) -> Finding:
    """Served prompts against the prompts of the rows, both decoded."""
    ending = bench.facts.ending
    differing = sum(a != b for a, b in zip(bench.prompts, bench.served_prompts, strict=True))
    if not differing:
        known = "serving's template is not known" if ending is None else "the rows' prompts end as serving ends them"
        return nothing_to_try("template or thinking", acceptance(bench.served), known)
    return compared(
        "template or thinking",
        "prompts that end as the rows' do, not as serving's template and options end them",
        acceptance(bench.served),
        acceptance(bench.generations),
        note=f"{differing} of {len(bench.prompts)} prompts end otherwise when served",
    )


def try_off_policy(bench: Bench) -> Finding:
    """The recorded answers against the target's own to the same prompts, no longer than the recorded ones."""
    own = [
        Text(text.name, (*prompt, *generation.tokens[: len(text.ids) - text.answer]), text.answer)
        for text, prompt, generation in zip(bench.texts, bench.prompts, bench.generations, strict=True)
    ]
    (before,), (after,) = (bench.prefixes(texts, [bench.as_it_is]) for texts in (own, bench.texts))
    return compared(
        "off-policy rows",
        "the rows' answers, not the target's own",
        before,
        after,
        note=f"{100 * _agreement(bench):.0f} % of the rows' tokens are what the target would say next",
    )


def try_truncation(bench: Bench) -> Finding:
    """Verification steps within the trained lengths against all of them."""
    within, every = _counts_within(bench), acceptance(bench.generations)
    beyond = int(every[:, 1].sum() - within[:, 1].sum())
    note = (
        f"the longest row trained on has {bench.reach} tokens, {100 * bench.facts.cut_share:.0f} % are cut at the limit"
    )
    if not beyond or not within[:, 1].any():
        return nothing_to_try("truncation", every, f"{note}; {'no' if not beyond else 'every'} served step lies beyond")
    return compared(
        "truncation",
        f"only the steps within {bench.reach} tokens",
        every,
        within,
        note=f"{note}; {beyond} of {int(every[:, 1].sum())} served steps lie beyond",
    )


def _counts_within(bench: Bench) -> Counts:
    """The counts of steps whose block ends within the trained lengths."""
    counts = np.zeros((len(bench.prompts), 2))
    for line, (prompt, generation) in enumerate(zip(bench.prompts, bench.generations, strict=True)):
        at = len(prompt)
        for step in generation.steps:
            if at + bench.config.block_size <= bench.reach:
                counts[line] += (step.accepted, 1)
            at += step.accepted + 1
    return counts


@torch.no_grad()
def _agreement(bench: Bench) -> float:
    """Share of recorded answer tokens that are the target's likeliest."""
    hits = total = 0
    for text in bench.texts[:AGREEMENT_ROWS]:
        ids = torch.tensor([text.ids], device=bench.target.device)
        said = bench.target.model(input_ids=ids, use_cache=False).logits[0, text.answer - 1 : -1].argmax(-1)
        hits += int((said == ids[0, text.answer :]).sum())
        total += len(said)
    return hits / max(1, total)
