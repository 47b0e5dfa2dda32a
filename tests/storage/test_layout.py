"""Every key of every object: what was written yesterday is found tomorrow."""

import ast
from pathlib import Path

import dflash_core
from dflash_core.storage.layout import (
    LATEST_RUN,
    LATEST_TRAINING_SET,
    GeneratedKeys,
    RunKeys,
    ShardKeys,
    TrainingSetKeys,
    latest_evaluation,
    shards_folder,
    statistics_folder,
)

FOLDERS = (
    *("generated_completions/", "tokenized_shards/", "loss_mask_stats/", "training_set/"),
    *("drafter_checkpoint/", "drafter_eval/", "drafter_export/"),
)


def test_keys_are_what_they_were() -> None:
    generated, shard, frozen = GeneratedKeys("p"), ShardKeys("f", "p"), TrainingSetKeys("h")
    assert (generated.manifest, generated.rejects, generated.ledger("r")) == (
        "generated_completions/p/manifest.json",
        "generated_completions/p/rejects.jsonl",
        "generated_completions/p/r/",
    )
    assert (shard.shard, shard.rejects, shard.manifest, shard.statistics) == (
        "tokenized_shards/f/p.arrow",
        "tokenized_shards/f/p.rejects.jsonl",
        "tokenized_shards/f/p.json",
        "loss_mask_stats/f/p.json",
    )
    assert (shards_folder("f"), statistics_folder("f")) == ("tokenized_shards/f/", "loss_mask_stats/f/")
    assert (frozen.manifest, frozen.statistics, frozen.report, frozen.picture) == (
        "training_set/h.json",
        "training_set/h.statistics.json",
        "training_set/h.html",
        "training_set/h.png",
    )
    assert (LATEST_TRAINING_SET, LATEST_RUN) == ("training_set/latest.json", "drafter_checkpoint/latest.json")
    run = RunKeys("r")
    assert (run.manifest, run.settings, run.config, run.weights, run.metrics, run.curve) == tuple(
        f"drafter_checkpoint/r/{name}"
        for name in (
            *("manifest.json", "recipe.json", "config.json", "model.safetensors", "metrics.jsonl"),
            "learning_curve.png",
        )
    )
    assert (run.saved_step(7), run.checkpoint_file(7, "x")) == (
        "drafter_checkpoint/r/checkpoints/00000007.json",
        "drafter_checkpoint/r/checkpoints/00000007/x",
    )
    assert (run.report, run.report_picture, run.report_markdown, run.serve_check) == tuple(
        f"drafter_eval/r/{name}" for name in ("report.json", "acceptance.png", "report.md", "serve_check.json")
    )
    assert (run.export_manifest, run.export_folder) == ("drafter_export/r/manifest.json", "drafter_export/r/")
    assert latest_evaluation("0123456789abcdef") == "drafter_eval/latest-0123456789ab.json"


def test_nothing_else_spells_a_key() -> None:
    core = Path(dflash_core.__file__).parent
    for path in set(core.rglob("*.py")) - {core / "storage/layout.py"}:
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf8"))))
        said = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}  # docstrings
        for node in nodes:
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in said:
                assert not node.value.startswith(FOLDERS), f"{path}:{node.lineno}: {node.value}"
