"""The model card of an exported drafter: how it is served, how it was made, on what data, and what it measured."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from dflash_core.drafter.config import DrafterConfig
from dflash_core.recipe import Recipe
from dflash_core.records import DrafterCheckpoint, DrafterEval, ServeCheck, TrainingSet
from dflash_core.reports.pages import render
from dflash_core.reports.sentences import reasons_text
from dflash_core.statistics.histogram import quantiles
from dflash_core.statistics.statistics import MergedStatistics

NOT_FOR_READERS = {"source", "storage"}
"""Tables of the recipe that only say where things are."""
Cells = dict[str, object]


@dataclass(frozen=True)
class Provenance:
    """Everything that a card tells about where its drafter comes from."""

    recipe: Recipe
    checkpoint: DrafterCheckpoint
    training_set: TrainingSet
    statistics: MergedStatistics
    report: DrafterEval | None
    """None: not evaluated yet."""
    served: ServeCheck | None
    """None: no server was asked yet."""


def model_card(config: DrafterConfig, of: Provenance) -> str:
    """README.md in Markdown."""
    recipe = of.recipe
    proposals = config.block_size - 1
    environment = "".join(f"{name}={value} " for name, value in vllm_environment(config.layer_types).items())
    notes = {} if of.report else {"Evaluation": "Draft-and-verify decoding had not been run when this was exported."}
    return render(
        "model_card.md",
        {
            "title": f"{recipe.name}: DFlash drafter for {recipe.target.path.name}",
            "introduction": "A block-diffusion draft model for speculative decoding. It drafts "
            f"{proposals} tokens after each verified one from the outputs of layers "
            f"{', '.join(map(str, config.target_layer_ids))} of its target, whose embedding and lm_head it shares. "
            "It is of use with exactly this target, tokenizer and chat template.",
            "commands": (
                f"{environment}vllm serve TARGET --speculative-config "
                f'\'{{"method": "dflash", "model": "THIS_FOLDER", "num_speculative_tokens": {proposals}}}\'',
                "python -m sglang.launch_server --model-path TARGET --speculative-algorithm DFLASH "
                "--speculative-draft-model-path THIS_FOLDER",
            ),
            "serving_notes": _serving_notes(config, recipe),
            "tables": {
                "Shape": _shape(config),
                "Lineage": _lineage(of),
                "Data": _data(of.training_set, of.statistics),
                "Evaluation": _evaluation(of),
            },
            "notes": notes,
            "recipe": json.dumps(recipe.model_dump(mode="json", exclude=NOT_FOR_READERS), indent=1),
        },
    )


def vllm_environment(layer_types: Sequence[str]) -> dict[str, str]:
    """What vLLM needs in its environment to serve a drafter of these layers.

    vLLM 0.32 serves drafters that mix sliding and full layers by its second model runner only, and refuses them where
    it has chosen the first.
    """
    return {"VLLM_USE_V2_MODEL_RUNNER": "1"} if len(set(layer_types)) > 1 else {}


def _serving_notes(config: DrafterConfig, recipe: Recipe) -> str:
    text = "Fewer proposals work, more do not."
    if recipe.export.speculators:
        text += " The folder speculators/ is the same drafter for vLLM's speculators library."
    if recipe.export.speculators and "sliding_attention" in config.layer_types:
        text += " vLLM 0.32 reads the causality of its sliding layers wrongly from there: serve this folder."
    return text + " `manifest.json` holds the sha256 of every file."


def _shape(config: DrafterConfig) -> Cells:
    return {
        "layers": f"{config.num_hidden_layers} ({', '.join(config.layer_types)})",
        "hidden / MLP size": f"{config.hidden_size} / {config.intermediate_size}",
        "heads": f"{config.num_attention_heads} / {config.num_key_value_heads} of {config.head_dim}",
        "block size": config.block_size,
        "mask token": config.mask_token_id,
        "vocabulary": config.vocab_size,
    }


def _lineage(of: Provenance) -> Cells:
    checkpoint, training_set = of.checkpoint, of.training_set
    passed = checkpoint.gate == "passed"
    return {
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
    }


def _data(training_set: TrainingSet, statistics: MergedStatistics) -> Cells:
    rows, numbers = "rows read / kept", [training_set.rows_read, training_set.rows_kept]
    dropped: Cells = {}
    if training_set.rows_dropped is not None:
        rows, numbers = f"{rows} / dropped", [*numbers, training_set.rows_dropped]
        dropped = {"dropped for": reasons_text(training_set.drop_reasons)}
    return {
        "source files": len(training_set.shards),
        "files without a valid shard": len(training_set.missing),
        f"{rows} / rejected": " / ".join(map(str, [*numbers, training_set.rows_rejected])),
        **dropped,
        "rejected for": reasons_text(training_set.reject_reasons),
        "tokens": training_set.tokens,
        "supervised tokens": training_set.supervised_tokens,
        "tokens a row": _spread(statistics.lengths),
        "supervised a row": _spread(statistics.supervised),
        "rows by how they ended": ", ".join(f"{how} {rows}" for how, rows in statistics.finish_reasons.items()),
    }


def _spread(counts: dict[int, int]) -> str:
    return ", ".join(f"{quantile} {value}" for quantile, value in quantiles(counts).items())


def _evaluation(of: Provenance) -> Cells:
    report, served = of.report, of.served
    facts: Cells = {"accepted prefix on held-out rows, teacher-forced": f"{of.checkpoint.held_out_accepted_prefix:.2f}"}
    if report is not None:
        facts |= {
            "held-out prompts": report.prompts,
            "temperature": report.temperature,
            "output equal to the target's own": "yes" if report.lossless else "no (or not comparable)",
            "acceptance length": f"{report.acceptance_length:.2f}",
            "acceptance length, n-gram drafter": f"{report.acceptance_length_ngram:.2f}",
            "acceptance length, features zeroed": f"{report.acceptance_length_no_features:.2f}",
            "tokens per second, with / without": f"{report.tokens_per_s:.1f} / {report.tokens_per_s_without:.1f}",
        }
    if report is not None and served is not None:
        facts["served, on the prompts of `dflash serve-check`"] = served.verdict
    return facts
