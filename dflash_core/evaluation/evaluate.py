"""The evaluation of a finished run: held-out prompts decoded with the drafter, and with what it must beat.

The trade-off: each prompt is decoded four times (drafter, n-gram drafter, drafter without features, no draft), because
a number without its rivals says nothing; one at a time, because that is what the speed of a single reader is.
"""

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from dflash_core.batches.cache import RowStore, open_rows
from dflash_core.batches.loader import split_rows
from dflash_core.batches.split import uniform_bits
from dflash_core.drafter.config import DrafterConfig, check_fit, read_target_config
from dflash_core.drafter.folder import build_drafter
from dflash_core.drafter.target_files import check_target
from dflash_core.drafter.trained import fetch_drafter, find_checkpoint
from dflash_core.errors import UserError
from dflash_core.evaluation.acceptance import acceptance_length, add, conditional_acceptance
from dflash_core.evaluation.decode import Generation, Sampling, generate, generate_plain
from dflash_core.evaluation.drafts import Draft, DrafterDraft, NgramDraft
from dflash_core.evaluation.ngram import NgramModel
from dflash_core.evaluation.target import VerifyingTarget, load_verifying_target
from dflash_core.quality.training_set import load_training_set
from dflash_core.recipe import Recipe
from dflash_core.records import DrafterCheckpoint, DrafterEval
from dflash_core.storage.store import open_stores

NGRAM_TOKENS = 2_000_000
"""Training tokens that the n-gram drafter is counted on, whole rows in hash order."""
FORMAT = 1
"""Raised whenever the same settings would give other numbers."""


@dataclass(frozen=True)
class _Rivals:
    """Every way in which a prompt is decoded."""

    drafter: Draft
    ngram: Draft
    no_features: Draft


@dataclass(frozen=True)
class _Decoded:
    """One prompt, decoded in all of them."""

    drafter: Generation
    ngram: Generation
    no_features: Generation
    plain: Generation


def evaluate_drafter(recipe: Recipe, run: str | None, on_progress: Callable[[int, int], None]) -> DrafterEval:
    """Measure acceptance by draft-and-verify decoding and write drafter_eval/<run>/report.json.

    A report that is there already and was made with the same settings is returned as it is. Sets this process's
    torch threads to `training.placement.threads`.

    Args:
        recipe: names target, stores and the evaluation's settings.
        run: a finished training run; None: the last one.
        on_progress: called with (prompts done, prompts in all).

    Raises:
        ObjectMissing: no such run, or its training set is gone.
        IncompatibleError: the target is not the one of the training.
        UserError: no held-out prompt.
    """
    store = open_stores(recipe).derived
    checkpoint = find_checkpoint(store, run)
    key, settings = f"drafter_eval/{checkpoint.run}/report.json", _settings(recipe, checkpoint)
    earlier = store.find_record(key, DrafterEval)
    if earlier is not None and earlier.settings == settings:
        return earlier
    if recipe.training.placement.threads:
        torch.set_num_threads(recipe.training.placement.threads)
    check_target(checkpoint, recipe.target.path)
    config, state = fetch_drafter(store, checkpoint, recipe.storage.work_dir)
    check_fit(config, read_target_config(recipe.target.path))
    training_set = load_training_set(recipe, checkpoint.training_set)
    rows = open_rows(store, training_set, recipe.storage.work_dir, recipe.storage.downloads)
    split = split_rows(rows, recipe.seed, recipe.training.held_out_share)
    prompts = held_out_prompts(rows, split.held_out, recipe.seed, recipe.evaluation.prompts)
    dtype = getattr(torch, recipe.target.dtype)
    device = torch.device(recipe.training.placement.targets[0])
    target = load_verifying_target(recipe.target.path, config.target_layer_ids, dtype, device)
    drafter = build_drafter(config, state, dtype).to(device).eval()
    temperature = recipe.evaluation.temperature
    rivals = _Rivals(
        DrafterDraft(drafter, target.embedding, target.lm_head, temperature=temperature),
        NgramDraft(
            NgramModel(recipe.evaluation.ngram, _training_rows(rows, split.training, recipe.seed)), config.block_size
        ),
        DrafterDraft(drafter, target.embedding, target.lm_head, temperature=temperature, zero_features=True),
    )
    decoded = []
    for number, prompt in enumerate(prompts):
        on_progress(number, len(prompts))
        seed = uniform_bits("evaluation", recipe.seed, number) >> 1
        sampling = Sampling(recipe.evaluation.max_new_tokens, target.stop_tokens, temperature, seed)
        decoded.append(_decode(target, rivals, prompt, sampling))
    on_progress(len(prompts), len(prompts))
    report = _report(checkpoint, config, recipe, decoded, settings)
    store.put_record(key, report)
    return report


def held_out_prompts(rows: RowStore, held_out: NDArray[np.int64], seed: int, count: int) -> list[list[int]]:
    """Tokens up to the first supervised one of held-out rows, each prompt once, the first `count` in hash order.

    Raises:
        UserError: there is none.
    """
    order = sorted(held_out.tolist(), key=lambda i: uniform_bits("evaluation prompt", seed, rows.row_ids[i]))
    prompts: dict[tuple[int, ...], None] = {}
    for index in order:
        row = rows.row(index)
        end = int(row.loss_mask.argmax())
        if end:
            prompts[tuple(row.ids[:end].tolist())] = None
        if len(prompts) == count:
            break
    if not prompts:
        raise UserError(
            f"none of {len(rows)} rows is held out with a prompt before its first supervised token; "
            "raise training.held_out_share"
        )
    return [list(prompt) for prompt in prompts]


def _training_rows(rows: RowStore, training: NDArray[np.int64], seed: int) -> Iterator[NDArray[np.int32]]:
    """Rows in hash order up to `NGRAM_TOKENS`."""
    total = 0
    for index in sorted(training.tolist(), key=lambda i: uniform_bits("n-gram", seed, rows.row_ids[i])):
        if total >= NGRAM_TOKENS:
            return
        ids = rows.row(index).ids
        total += len(ids)
        yield ids


def _decode(target: VerifyingTarget, rivals: _Rivals, prompt: list[int], sampling: Sampling) -> _Decoded:
    return _Decoded(
        generate(target, rivals.drafter, prompt, sampling),
        generate(target, rivals.ngram, prompt, sampling),
        generate(target, rivals.no_features, prompt, sampling),
        generate_plain(target, prompt, sampling),
    )


def _report(
    checkpoint: DrafterCheckpoint, config: DrafterConfig, recipe: Recipe, decoded: list[_Decoded], settings: str
) -> DrafterEval:
    histogram = add([d.drafter.histogram for d in decoded])
    tokens = sum(len(d.drafter.tokens) for d in decoded)
    plain_tokens = sum(len(d.plain.tokens) for d in decoded)
    return DrafterEval(
        run=checkpoint.run,
        prompts=len(decoded),
        temperature=recipe.evaluation.temperature,
        block_size=config.block_size,
        lossless=recipe.evaluation.temperature == 0
        and all(g.tokens == d.plain.tokens for d in decoded for g in (d.drafter, d.ngram, d.no_features)),
        acceptance_length=acceptance_length(histogram),
        acceptance_length_per_prompt=tuple(acceptance_length(d.drafter.histogram) for d in decoded),
        acceptance_length_ngram=acceptance_length(add([d.ngram.histogram for d in decoded])),
        acceptance_length_no_features=acceptance_length(add([d.no_features.histogram for d in decoded])),
        conditional_acceptance=conditional_acceptance(histogram),
        tokens=tokens,
        verification_steps=sum(histogram),
        histogram=histogram,
        tokens_per_s=tokens / max(sum(d.drafter.seconds for d in decoded), 1e-9),
        tokens_per_s_without=plain_tokens / max(sum(d.plain.seconds for d in decoded), 1e-9),
        settings=settings,
    )


def _settings(recipe: Recipe, checkpoint: DrafterCheckpoint) -> str:
    """sha256 over what decides the numbers, the wish of a minimum excepted."""
    table = {
        "format": FORMAT,
        "evaluation": recipe.evaluation.model_dump(mode="json", exclude={"min_acceptance_length"}),
        "seed": recipe.seed,
        "held_out_share": recipe.training.held_out_share,
        "dtype": recipe.target.dtype,
        "weights": checkpoint.weights.sha256,
        "config": checkpoint.config.sha256,
        "training_set": checkpoint.training_set,
        "target": checkpoint.target_fingerprint,
    }
    return hashlib.sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()
