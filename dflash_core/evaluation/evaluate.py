"""The evaluation of a finished run: held-out prompts decoded with the drafter, and with what it must beat.

The trade-off: each prompt is decoded four times (drafter, n-gram drafter, drafter without features, no draft), because
a number without its rivals says nothing; further temperatures and thinking states take fewer prompts.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from dflash_core.batches.order import uniform_bits
from dflash_core.decoding.drafts import NgramModel
from dflash_core.decoding.prompts import held_out_prompts, thinking_switch
from dflash_core.drafter.folder import fetch_drafter
from dflash_core.drafter.runs import find_checkpoint
from dflash_core.errors import IncompatibleError
from dflash_core.evaluation.held_out import Subject, load_subject, open_held_out
from dflash_core.evaluation.measure import Meter
from dflash_core.evaluation.report import NOTHING_STORED, Origin, assemble, find_previous
from dflash_core.recipe import Recipe, settings_hash
from dflash_core.records import DrafterCheckpoint, DrafterEval, OnProgress, RunPointer
from dflash_core.reports.pages import acceptance_report
from dflash_core.reports.plots import acceptance_picture
from dflash_core.storage.layout import RunKeys, latest_evaluation
from dflash_core.storage.s3 import Store
from dflash_core.target.files import check_target
from dflash_core.workspace import Workspace

NGRAM_TOKENS = 2_000_000
"""Training tokens that the n-gram drafter is counted on, whole rows in hash order."""
EVALUATION_VERSION = "4"
"""Raised by hand when the same settings would give other numbers."""


def evaluate_drafter(workspace: Workspace, run: str | None, on_progress: OnProgress) -> DrafterEval:
    """Measure acceptance by draft-and-verify decoding and write drafter_eval/<run>/: picture, report.md, report.json.

    A report that is there already and was made with the same settings is returned as it is. Sets this process's
    torch threads to `training.placement.threads`.

    Args:
        workspace: its recipe names the target and the evaluation's settings.
        run: a finished training run; None: the last one.
        on_progress: called with (prompts decoded, prompts to decode), each counted once for every way of decoding it.

    Raises:
        ObjectMissing: no such run, or its training set is gone.
        IncompatibleError: the target is not the one of the training, or does not fit; the message holds both values.
        UserError: no held-out prompt.
    """
    recipe, store = workspace.recipe, workspace.derived
    checkpoint = find_checkpoint(store, run)
    settings = _settings(recipe, checkpoint)
    earlier = store.find_record(RunKeys(checkpoint.run).report, DrafterEval)
    if earlier is not None and earlier.settings == settings:
        return earlier
    check_target(checkpoint, recipe)
    config, state = fetch_drafter(workspace, checkpoint)
    wanted = recipe.evaluation.block_size or config.block_size
    if wanted > config.block_size:
        raise IncompatibleError(
            f"evaluation.block_size {wanted} exceeds the {config.block_size} that run {checkpoint.run} was trained "
            "with, so its later slots were never trained; lower it"
        )
    subject = load_subject(open_held_out(workspace, config, checkpoint.training_set), config, state)
    prompts = held_out_prompts(subject.rows, subject.split.held_out, recipe.seed, recipe.evaluation.prompts)
    switch = thinking_switch(recipe.tokenization, subject.tokenizer)
    meter = Meter(subject, NgramModel(recipe.evaluation.ngram, training_rows(subject)), on_progress)
    decoded = meter.measure(prompts, None if isinstance(switch, str) else switch)
    previous = find_previous(store, checkpoint.run, checkpoint.target_fingerprint)
    origin = Origin(checkpoint, settings, switch if isinstance(switch, str) else None, previous)
    return _store(store, assemble(subject, decoded, origin))


def training_rows(subject: Subject) -> Iterator[NDArray[np.int32]]:
    """Token ids of training rows in hash order up to `NGRAM_TOKENS`."""
    rows, total = subject.rows, 0
    order = sorted(
        subject.split.training.tolist(), key=lambda i: uniform_bits("n-gram", subject.recipe.seed, rows.row_ids[i])
    )
    for index in order:
        if total >= NGRAM_TOKENS:
            return
        ids, _ = rows.row(index)
        total += len(ids)
        yield ids


def _store(store: Store, report: DrafterEval) -> DrafterEval:
    """Picture and Markdown first, then the report that names them, then its target's pointer to it."""
    assert report.picture == NOTHING_STORED
    keys, picture = RunKeys(report.run), acceptance_picture(report)
    text = acceptance_report(report, picture).encode()
    report = report.model_copy(
        update={
            "picture": store.put(keys.report_picture, picture, "image/png"),
            "markdown": store.put(keys.report_markdown, text, "text/markdown; charset=utf-8"),
        }
    )
    store.put_record(keys.report, report)
    store.put_record(latest_evaluation(report.target_fingerprint), RunPointer(run=report.run))
    return report


def _settings(recipe: Recipe, checkpoint: DrafterCheckpoint) -> str:
    """sha256 over everything that decides the numbers."""
    return settings_hash(
        recipe.settings_for("acceptance"),
        {
            "code_version": EVALUATION_VERSION,
            "weights": checkpoint.weights.sha256,
            "config": checkpoint.config.sha256,
            "training_set": checkpoint.training_set,
            "target": checkpoint.target_fingerprint,
        },
    )
