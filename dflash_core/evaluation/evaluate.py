"""The evaluation of a finished run: held-out prompts decoded with the drafter, and with what it must beat.

The trade-off: each prompt is decoded four times (drafter, n-gram drafter, drafter without features, no draft), because
a number without its rivals says nothing; further temperatures and thinking states take fewer prompts.
"""

import hashlib
import json
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from dflash_core.batches.cache import RowStore
from dflash_core.batches.split import uniform_bits
from dflash_core.drafter.runs import find_checkpoint
from dflash_core.drafter.target_files import check_target
from dflash_core.drafter.trained import fetch_drafter
from dflash_core.errors import IncompatibleError
from dflash_core.evaluation.markdown import report_markdown
from dflash_core.evaluation.measure import Meter, Progress
from dflash_core.evaluation.ngram import NgramModel
from dflash_core.evaluation.picture import acceptance_picture
from dflash_core.evaluation.previous import find_previous, latest_key, report_key
from dflash_core.evaluation.prompts import held_out_prompts, thinking_switch
from dflash_core.evaluation.report import NOTHING_STORED, Origin, assemble
from dflash_core.evaluation.subject import Subject, load_subject, open_held_out
from dflash_core.recipe import Recipe
from dflash_core.records import DrafterCheckpoint, DrafterEval, RunPointer
from dflash_core.storage.store import Store, open_stores

NGRAM_TOKENS = 2_000_000
"""Training tokens that the n-gram drafter is counted on, whole rows in hash order."""
FORMAT = 3
"""Raised whenever the same settings would give other numbers."""


def evaluate_drafter(recipe: Recipe, run: str | None, on_progress: Progress) -> DrafterEval:
    """Measure acceptance by draft-and-verify decoding and write drafter_eval/<run>/: picture, report.md, report.json.

    A report that is there already and was made with the same settings is returned as it is. Sets this process's
    torch threads to `training.placement.threads`.

    Args:
        recipe: names target, stores and the evaluation's settings.
        run: a finished training run; None: the last one.
        on_progress: called with (prompts decoded, prompts to decode), each counted once for every way of decoding it.

    Raises:
        ObjectMissing: no such run, or its training set is gone.
        IncompatibleError: the target is not the one of the training, or does not fit; the message holds both values.
        UserError: no held-out prompt.
    """
    store = open_stores(recipe).derived
    checkpoint = find_checkpoint(store, run)
    settings = _settings(recipe, checkpoint)
    earlier = store.find_record(report_key(checkpoint.run), DrafterEval)
    if earlier is not None and earlier.settings == settings:
        return earlier
    check_target(checkpoint, recipe)
    config, state = fetch_drafter(store, checkpoint, recipe.storage.work_dir)
    wanted = recipe.evaluation.block_size or config.block_size
    if wanted > config.block_size:
        raise IncompatibleError(
            f"evaluation.block_size {wanted} exceeds the {config.block_size} that run {checkpoint.run} was trained "
            "with, so its later slots were never trained; lower it"
        )
    subject = load_subject(open_held_out(recipe, config, checkpoint.training_set), config, state)
    prompts = held_out_prompts(subject.rows, subject.split.held_out, recipe.seed, recipe.evaluation.prompts)
    switch = thinking_switch(recipe, subject.tokenizer)
    meter = Meter(subject, NgramModel(recipe.evaluation.ngram, training_rows(subject)), on_progress)
    measured = meter.measure(prompts, None if isinstance(switch, str) else switch)
    previous = find_previous(store, checkpoint.run, checkpoint.target_fingerprint)
    origin = Origin(checkpoint, settings, switch if isinstance(switch, str) else None, previous)
    return _store(store, assemble(subject, measured, origin))


def training_rows(subject: Subject) -> Iterator[NDArray[np.int32]]:
    """Token ids of training rows in hash order up to `NGRAM_TOKENS`."""
    rows: RowStore = subject.rows
    total = 0
    order = sorted(
        subject.split.training.tolist(), key=lambda i: uniform_bits("n-gram", subject.recipe.seed, rows.row_ids[i])
    )
    for index in order:
        if total >= NGRAM_TOKENS:
            return
        ids = rows.row(index).ids
        total += len(ids)
        yield ids


def _store(store: Store, report: DrafterEval) -> DrafterEval:
    """Picture and Markdown first, then the report that names them, then its target's pointer to it."""
    assert report.picture == NOTHING_STORED
    below = f"drafter_eval/{report.run}/"
    picture = acceptance_picture(report)
    text = report_markdown(report, picture).encode()
    report = report.model_copy(
        update={
            "picture": store.put(f"{below}acceptance.png", picture, "image/png"),
            "markdown": store.put(f"{below}report.md", text, "text/markdown; charset=utf-8"),
        }
    )
    store.put_record(report_key(report.run), report)
    store.put_record(latest_key(report.target_fingerprint), RunPointer(run=report.run))
    return report


def _settings(recipe: Recipe, checkpoint: DrafterCheckpoint) -> str:
    """sha256 over what decides the numbers, the wish of a minimum excepted."""
    table = {
        "format": FORMAT,
        "evaluation": recipe.evaluation.model_dump(mode="json", exclude={"min_acceptance_length"}),
        "seed": recipe.seed,
        "held_out_share": recipe.training.held_out_share,
        "dtype": recipe.target.dtype,
        "template_options": recipe.tokenization.template_options,
        "weights": checkpoint.weights.sha256,
        "config": checkpoint.config.sha256,
        "training_set": checkpoint.training_set,
        "target": checkpoint.target_fingerprint,
    }
    return hashlib.sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()
