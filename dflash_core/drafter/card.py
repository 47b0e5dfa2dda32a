"""The model card of an exported drafter: how it is served, how it was made, on what data, and what it measured."""

import json
from collections.abc import Mapping
from dataclasses import dataclass

from dflash_core.drafter.config import DrafterConfig
from dflash_core.drafter.vllm import vllm_environment
from dflash_core.quality.histogram import quantiles
from dflash_core.quality.statistics import MergedStatistics
from dflash_core.recipe import Recipe
from dflash_core.records import DrafterCheckpoint, DrafterEval, ServeCheck, TrainingSet

NOT_FOR_READERS = {"source", "storage"}
"""Tables of the recipe that only say where things lie."""


@dataclass(frozen=True)
class Lineage:
    """Everything that a card tells about where its drafter comes from."""

    recipe: Recipe
    checkpoint: DrafterCheckpoint
    training_set: TrainingSet
    statistics: MergedStatistics
    report: DrafterEval | None
    """None: not evaluated yet."""
    served: ServeCheck | None
    """None: no server was asked yet."""


def model_card(config: DrafterConfig, of: Lineage) -> str:
    """README.md in Markdown."""
    recipe = of.recipe
    settings = recipe.model_dump(mode="json", exclude=NOT_FOR_READERS)
    sections = [
        f"# {recipe.name}: DFlash drafter for {recipe.target.path.name}",
        "A block-diffusion draft model for speculative decoding. It drafts "
        f"{config.block_size - 1} tokens after each verified one from the outputs of layers "
        f"{', '.join(map(str, config.target_layer_ids))} of its target, whose embedding and lm_head it shares. "
        "It is of use with exactly this target, tokenizer and chat template.",
        _serving(config, recipe),
        _table(
            "Shape",
            {
                "layers": f"{config.num_hidden_layers} ({', '.join(config.layer_types)})",
                "hidden / MLP size": f"{config.hidden_size} / {config.intermediate_size}",
                "heads": f"{config.num_attention_heads} / {config.num_key_value_heads} of {config.head_dim}",
                "block size": config.block_size,
                "mask token": config.mask_token_id,
                "vocabulary": config.vocab_size,
            },
        ),
        _lineage(of),
        _data(of.training_set, of.statistics),
        _evaluation(of),
        f"## Recipe\n\n```json\n{json.dumps(settings, indent=1)}\n```",
    ]
    return "\n\n".join(sections) + "\n"


def _serving(config: DrafterConfig, recipe: Recipe) -> str:
    proposals = config.block_size - 1
    environment = "".join(f"{name}={value} " for name, value in vllm_environment(config.layer_types).items())
    vllm = (
        f"{environment}vllm serve TARGET --speculative-config "
        f'\'{{"method": "dflash", "model": "THIS_FOLDER", "num_speculative_tokens": {proposals}}}\''
    )
    sglang = (
        "python -m sglang.launch_server --model-path TARGET --speculative-algorithm DFLASH "
        "--speculative-draft-model-path THIS_FOLDER"
    )
    text = f"## Serving\n\n```\n{vllm}\n{sglang}\n```\n\nFewer proposals work, more do not."
    if recipe.export.speculators:
        text += " The folder speculators/ is the same drafter for vLLM's speculators library."
    if recipe.export.speculators and "sliding_attention" in config.layer_types:
        text += " vLLM 0.32 reads the causality of its sliding layers wrongly from there: serve this folder."
    return text + " `manifest.json` holds the sha256 of every file."


def _lineage(of: Lineage) -> str:
    checkpoint, training_set = of.checkpoint, of.training_set
    passed = checkpoint.gate == "passed"
    return _table(
        "Lineage",
        {
            "run": checkpoint.run,
            "recipe": checkpoint.recipe,
            "training set": training_set.hash,
            "tokenization fingerprint": training_set.fingerprint,
            "target fingerprint": checkpoint.target_fingerprint,
            "gate": "passed" if passed else f"{checkpoint.gate}: {'; '.join(training_set.verdict.reasons)}",
            "steps": checkpoint.steps,
            "training time": f"{checkpoint.train_s:.0f} s",
            "final loss": f"{checkpoint.final_loss:.4f} nats",
            "weights": f"{of.recipe.export.dtype}, from fp32 masters with sha256 {checkpoint.weights.sha256}",
        },
    )


def _data(training_set: TrainingSet, statistics: MergedStatistics) -> str:
    rejects = ", ".join(f"{reason} {rows}" for reason, rows in training_set.reject_reasons.items())
    spread = {
        name: ", ".join(f"{quantile} {value}" for quantile, value in quantiles(counts).items())
        for name, counts in (("tokens a row", statistics.lengths), ("supervised a row", statistics.supervised))
    }
    return _table(
        "Data",
        {
            "source files": len(training_set.shards),
            "files without a valid shard": len(training_set.missing),
            "rows read / kept / rejected": f"{training_set.rows_read} / {training_set.rows_kept} / "
            f"{training_set.rows_rejected}",
            "rejected for": rejects or "nothing",
            "tokens": training_set.tokens,
            "supervised tokens": training_set.supervised_tokens,
            **spread,
            "rows by how they ended": ", ".join(f"{how} {rows}" for how, rows in statistics.finish_reasons.items()),
        },
    )


def _evaluation(of: Lineage) -> str:
    report, served = of.report, of.served
    prefix = f"{of.checkpoint.held_out_accepted_prefix:.2f}"
    held_out: dict[str, object] = {"accepted prefix on held-out rows, teacher-forced": prefix}
    if report is None:
        return _table("Evaluation", held_out) + "\n\nDraft-and-verify decoding had not been run when this was exported."
    decoded: dict[str, object] = {
        "held-out prompts": report.prompts,
        "temperature": report.temperature,
        "output equal to the target's own": "yes" if report.lossless else "no (or not comparable)",
        "acceptance length": f"{report.acceptance_length:.2f}",
        "acceptance length, n-gram drafter": f"{report.acceptance_length_ngram:.2f}",
        "acceptance length, features zeroed": f"{report.acceptance_length_no_features:.2f}",
        "tokens per second, with / without": f"{report.tokens_per_s:.1f} / {report.tokens_per_s_without:.1f}",
    }
    if served is not None:
        decoded["served, on the prompts of `dflash serve-check`"] = served.verdict
    return _table("Evaluation", held_out | decoded)


def _table(title: str, rows: Mapping[str, object]) -> str:
    lines = [f"| {name} | {str(value).replace('|', chr(92) + '|')} |" for name, value in rows.items()]
    return "\n".join([f"## {title}", "", "| | |", "|---|---|", *lines])
