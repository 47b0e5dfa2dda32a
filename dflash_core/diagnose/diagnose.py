"""`dflash diagnose`: training said one thing, serving another; which of the known causes is between them?

The trade-off: every cause is an experiment on the same few held-out rows, so a verdict is a measured number, not a
guess from settings; what no experiment restores is said to be unexplained.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from dflash_core.decoding.acceptance import StepCounts, acceptance_interval, length_of
from dflash_core.decoding.decode import DecodedAnswer
from dflash_core.decoding.prompts import held_out_prompts, served_ending
from dflash_core.diagnose.assumption import RecordedAnswer
from dflash_core.diagnose.causes import (
    Evidence,
    Facts,
    Finding,
    acceptance,
    is_clear,
    is_enough,
    try_off_policy,
    try_shapes,
    try_template,
    try_truncation,
    within_answers,
)
from dflash_core.drafter.config import FAMILY_MASK_IDS, DrafterConfig, drafter_config
from dflash_core.drafter.folder import fetch_drafter, read_config, read_manifest, read_state
from dflash_core.drafter.runs import find_checkpoint
from dflash_core.errors import IncompatibleError
from dflash_core.evaluation.held_out import Subject, load_subject, open_held_out
from dflash_core.records import LEAST_PROMPTS, DrafterCheckpoint, OnProgress, Record
from dflash_core.storage.layout import RunKeys
from dflash_core.target.files import (
    LM_HEAD_KEYS,
    check_target,
    is_tied,
    read_target_config,
    safetensors_files,
    text_config,
    tokenizer_mask_id,
)
from dflash_core.workspace import Workspace

PROMPTS = 16
THETAS = (1e4, 1e5, 5e5, 1e6, 5e6, 1e7)
NO_NUMBER_KEYS = {"dtype", "bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings"}
"""Of a config: differences in them change nothing that is measured here."""


class Diagnosis(Record):
    """What was measured, what was tried, and what explains the gap."""

    drafter: str
    """Run or folder."""
    prompts: int
    trained_prefix: float | None
    """Accepted prefix on held-out rows as training reported it; None: the run is not known."""
    measured_prefix: float
    """The same measured now, with the drafter as it would be served."""
    served: float
    """Acceptance length of decoding the same rows' prompts as serving has them."""
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]
    """Differences from the run that the drafter comes from."""
    conclusion: str


@dataclass(frozen=True)
class _Suspect:
    """A drafter to be looked at and what is known of its training."""

    name: str
    config: DrafterConfig
    state: dict[str, Tensor]
    checkpoint: DrafterCheckpoint | None
    trained_config: DrafterConfig | None
    notes: tuple[str, ...] = ()


def diagnose(workspace: Workspace, run: str | None, folder: Path | None, on_progress: OnProgress) -> Diagnosis:
    """Diagnose a finished run, or a drafter folder, against the recipe's target as the recipe would serve it.

    Args:
        workspace: its recipe names target, and the template and options that serving uses.
        run: a finished training run; None: the last one.
        folder: a drafter folder in place of a run; an export of ours names the run it comes from.
        on_progress: called with (experiments done, experiments).

    Raises:
        ObjectMissing: no such run.
        IncompatibleError: the folder cannot be read, does not fit the target, or the target is not that of the
            training; the message holds both values.
        UserError: no held-out prompt.
    """
    drafter = _of_run(workspace, run) if folder is None else _of_folder(workspace, folder)
    if drafter.checkpoint is not None:
        check_target(drafter.checkpoint, workspace.recipe)
    training_set = None if drafter.checkpoint is None else drafter.checkpoint.training_set
    subject = load_subject(open_held_out(workspace, drafter.config, training_set), drafter.config, drafter.state)
    evidence = gather_evidence(subject, [] if drafter.trained_config is None else [drafter.trained_config])
    trained = None if drafter.checkpoint is None else drafter.checkpoint.held_out_accepted_prefix
    return diagnose_evidence(evidence, drafter.name, trained, drafter.notes, on_progress)


def diagnose_evidence(
    evidence: Evidence, name: str, trained_prefix: float | None, notes: Sequence[str], on_progress: OnProgress
) -> Diagnosis:
    """Make every experiment and draw the conclusion."""
    on_progress(0, 5)
    served = length_of(acceptance(evidence.served))
    on_progress(1, 5)
    prefixes, findings = try_shapes(evidence)
    on_progress(2, 5)
    for done, experiment in enumerate((try_template, try_off_policy, try_truncation), 3):
        findings.append(experiment(evidence))
        on_progress(done, 5)
    measured = length_of(prefixes)
    return Diagnosis(
        drafter=name,
        prompts=len(evidence.texts),
        trained_prefix=trained_prefix,
        measured_prefix=measured,
        served=served,
        findings=tuple(findings),
        notes=tuple(notes),
        conclusion=_conclusion(findings, trained_prefix, prefixes, evidence.served, notes),
    )


def gather_evidence(subject: Subject, references: Sequence[DrafterConfig]) -> Evidence:
    """Held-out rows and everything that alternatives can be drawn from."""
    recipe, rows = subject.recipe, subject.rows
    prompts = held_out_prompts(rows, subject.split.held_out, recipe.seed, PROMPTS)
    texts = [RecordedAnswer(p.row_id, tuple(rows.row(p.row)[0].tolist()), len(p.ids)) for p in prompts]
    lengths = rows.lengths[subject.split.training] if len(subject.split.training) else rows.lengths
    return Evidence(
        drafter=subject.drafter,
        target=subject.target,
        texts=texts,
        reach=int(lengths.max()),
        max_new_tokens=recipe.evaluation.max_new_tokens,
        facts=_facts(subject, references, float(np.mean(lengths >= recipe.tokenization.max_length))),
    )


def _facts(subject: Subject, references: Sequence[DrafterConfig], cut_share: float) -> Facts:
    recipe, config = subject.recipe, subject.config
    target_config = read_target_config(recipe.target.path)
    text = text_config(target_config)
    own_mask = tokenizer_mask_id(recipe.tokenizer_path)
    known = list(references)
    with suppress(IncompatibleError):  # the recipe's drafter is another one; it only lends alternatives
        known.append(drafter_config(recipe, target_config, own_mask))
    named = [value for value in (text.get("pad_token_id"), text.get("eos_token_id")) if isinstance(value, int)]
    masks = [own_mask, *FAMILY_MASK_IDS.values(), *subject.tokenizer.added.values(), *named, config.vocab_size - 1, 0]
    rope = text.get("rope_parameters") or {}
    thetas = [text.get("rope_theta"), rope.get("rope_theta"), recipe.drafter.rope_theta, *THETAS]
    return Facts(
        references=tuple(known),
        mask_ids=tuple(mask for mask in masks if mask is not None),
        thetas=tuple(float(theta) for theta in thetas if theta),
        window=recipe.drafter.sliding_window or 2048,
        lm_heads=tuple(other_heads(recipe.target.path, subject.target.lm_head)),
        ending=served_ending(subject.tokenizer),
        cut_share=cut_share,
    )


def other_heads(folder: Path, like: Tensor) -> list[tuple[str, Tensor]]:
    """An lm_head in the target's files although its config ties it to the embedding."""
    found: list[tuple[str, Tensor]] = []
    for file in safetensors_files(folder) if is_tied(folder) else []:
        with safe_open(file, framework="pt") as opened:
            for key in set(opened.keys()) & set(LM_HEAD_KEYS):
                head = opened.get_tensor(key).to(like.device, like.dtype)
                if not torch.equal(head, like):
                    found.append((f"{key} of {file.name}, though the config ties it", head))
    return found


def _of_run(workspace: Workspace, run: str | None) -> _Suspect:
    checkpoint = find_checkpoint(workspace.derived, run)
    config, state = fetch_drafter(workspace, checkpoint)
    return _Suspect(f"run {checkpoint.run}", config, state, checkpoint, None)


def _of_folder(workspace: Workspace, folder: Path) -> _Suspect:
    """A folder, and the run that its manifest names, if the store has it."""
    config = read_config(folder)
    state = read_state(folder, config)
    export = read_manifest(folder)
    manifest = None if export is None else RunKeys(export.run).manifest
    checkpoint = None if manifest is None else workspace.derived.find_record(manifest, DrafterCheckpoint)
    if checkpoint is None:
        return _Suspect(str(folder), config, state, None, None)
    trained_config, masters = fetch_drafter(workspace, checkpoint)
    notes = [
        f"config.json has {key} = {value}, run {checkpoint.run} was trained with {asdict(trained_config)[key]}"
        for key, value in asdict(config).items()
        if key not in NO_NUMBER_KEYS and value != asdict(trained_config)[key]
    ]
    changed = [name for name in state if not torch.equal(state[name], masters[name].to(state[name].dtype))]
    if changed:
        notes.append(f"{len(changed)} of {len(state)} tensors differ from run {checkpoint.run}, first {changed[0]}")
    return _Suspect(str(folder), config, state, checkpoint, trained_config, tuple(notes))


def _conclusion(
    findings: Sequence[Finding],
    trained: float | None,
    prefixes: StepCounts,
    served: Sequence[DecodedAnswer],
    notes: Sequence[str],
) -> str:
    """What explains the gap; where nothing does, whether there is one: since training, or between text and decoding."""
    measured, decoded = length_of(prefixes), length_of(acceptance(served))
    explaining = sorted((f for f in findings if f.explains), key=lambda f: (f.before or 0.0) - (f.after or 0.0))
    reported = "" if trained is None else f"; training reported {trained:.2f}"
    if explaining:
        best = explaining[0]
        others = "".join(f"; {f.cause} helps, too ({f.before:.2f} to {f.after:.2f})" for f in explaining[1:])
        return (
            f"{best.cause} explains it: with {best.tried}, acceptance goes from {best.before:.2f} to "
            f"{best.after:.2f}{reported}{others}."
        )
    beside = "".join(f"; {note}" for note in notes)
    interval = acceptance_interval(prefixes)
    if interval is None:
        return (
            f"Not decided: {len(prefixes)} held-out prompts are too few to tell a difference from noise, "
            f"{LEAST_PROMPTS} are needed (served {decoded:.2f}, accepted prefix {measured:.2f}{reported}{beside}); "
            "raise training.held_out_share."
        )
    if trained is not None and is_enough(measured, trained) and interval[1] < trained:
        return f"Unexplained: training reported {trained:.2f}, the same rows now give {measured:.2f}{beside}."
    if is_clear(within_answers(served), prefixes):
        return (
            f"Unexplained: recorded text gives {measured:.2f}, decoding its prompts {decoded:.2f}{reported}{beside}; "
            "`dflash evaluate` shows where it stops, `dflash serve-check` whether a server stops there, too."
        )
    return (
        f"Nothing found: no cause changes acceptance for the better (served {decoded:.2f}, accepted prefix on held-out "
        f"rows {measured:.2f}{reported}); the drafter is as good as its training made it."
    )
