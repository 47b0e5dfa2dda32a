"""The model card of an exported drafter: what it is for, how it was made, on what data, and what it measured."""

from collections.abc import Mapping

from dflash_core.drafter.config import DrafterConfig
from dflash_core.recipe import Recipe
from dflash_core.records import DrafterCheckpoint, DrafterEval, TrainingSet


def model_card(
    recipe: Recipe,
    config: DrafterConfig,
    checkpoint: DrafterCheckpoint,
    training_set: TrainingSet,
    report: DrafterEval | None,
) -> str:
    """README.md in Markdown."""
    verdict = (
        "passed" if checkpoint.gate == "passed" else f"{checkpoint.gate}: {'; '.join(training_set.verdict.reasons)}"
    )
    sections = [
        f"# {recipe.name}: DFlash drafter for {recipe.target.path.name}",
        "A block-diffusion draft model for speculative decoding. It drafts "
        f"{config.block_size - 1} tokens after each verified one from the outputs of layers "
        f"{', '.join(map(str, config.target_layer_ids))} of its target, whose embedding and lm_head it shares. "
        "It is of use with exactly this target, tokenizer and chat template.",
        "## Serving\n\n"
        '```\n--speculative-config \'{"method": "dflash", "model": "<this folder>", '
        f'"num_speculative_tokens": {config.block_size - 1}}}\'\n```',
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
        _table(
            "Lineage",
            {
                "run": checkpoint.run,
                "recipe": checkpoint.recipe,
                "training set": training_set.hash,
                "tokenization fingerprint": training_set.fingerprint,
                "target fingerprint": checkpoint.target_fingerprint,
                "gate": verdict,
                "steps": checkpoint.steps,
                "training time": f"{checkpoint.train_s:.0f} s",
                "final loss": f"{checkpoint.final_loss:.4f} nats",
                "weights": f"{recipe.export.dtype}, from fp32 masters with sha256 {checkpoint.weights.sha256}",
            },
        ),
        _table(
            "Data",
            {
                "source files": len(training_set.shards),
                "files without a valid shard": len(training_set.missing),
                "rows read / kept / rejected": f"{training_set.rows_read} / {training_set.rows_kept} / "
                f"{training_set.rows_rejected}",
                "tokens": training_set.tokens,
                "supervised tokens": training_set.supervised_tokens,
            },
        ),
        _evaluation(checkpoint, report),
    ]
    return "\n\n".join(sections) + "\n"


def _evaluation(checkpoint: DrafterCheckpoint, report: DrafterEval | None) -> str:
    held_out = {"accepted prefix on held-out rows, teacher-forced": f"{checkpoint.held_out_accepted_prefix:.2f}"}
    if report is None:
        return _table("Evaluation", held_out) + "\n\nDraft-and-verify decoding had not been run when this was exported."
    return _table(
        "Evaluation",
        {
            **held_out,
            "held-out prompts": report.prompts,
            "temperature": report.temperature,
            "output equal to the target's own": "yes" if report.lossless else "no (or not comparable)",
            "acceptance length": f"{report.acceptance_length:.2f}",
            "acceptance length, n-gram drafter": f"{report.acceptance_length_ngram:.2f}",
            "acceptance length, features zeroed": f"{report.acceptance_length_no_features:.2f}",
            "tokens per second, with / without": f"{report.tokens_per_s:.1f} / {report.tokens_per_s_without:.1f}",
        },
    )


def _table(title: str, rows: Mapping[str, object]) -> str:
    lines = [f"| {name} | {str(value).replace('|', chr(92) + '|')} |" for name, value in rows.items()]
    return "\n".join([f"## {title}", "", "| | |", "|---|---|", *lines])
