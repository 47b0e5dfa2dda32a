"""A run from job to published checkpoint: its data, its drafter and what that starts from, its probe."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, cast

import pytest
import torch
from safetensors.torch import load

from dflash_core.batches.rows import RowStore
from dflash_core.drafter.config import DrafterConfig, drafter_config
from dflash_core.errors import GateError, IncompatibleError, RecipeError
from dflash_core.evaluation.evaluate import evaluate_drafter
from dflash_core.export.export import export_drafter
from dflash_core.recipe import Recipe
from dflash_core.records import DrafterCheckpoint, RunPointer
from dflash_core.storage.layout import LATEST_RUN, RunKeys
from dflash_core.storage.s3 import Store
from dflash_core.target.files import read_target_config
from dflash_core.training import publish
from dflash_core.training import train as module
from dflash_core.training.identity import CHECKPOINTS, LOCAL_RUNS
from dflash_core.training.job import Job
from dflash_core.training.metrics import StepMetrics
from dflash_core.training.placement import RankPlacement
from dflash_core.training.publish import RunFiles, TrainingResult
from dflash_core.training.train import make_data, make_learner, train
from dflash_core.workspace import connect
from tests.target.conftest import FAMILIES
from tests.training.conftest import put_training_set, random_rows, row_store, write_tokenizer


def trained(recipe: Recipe, training_set: str) -> tuple[DrafterCheckpoint, list[StepMetrics]]:
    seen: list[StepMetrics] = []
    return train(connect(recipe), Job(training_set), seen.append), seen


def test_a_run_learns_is_published_and_is_not_repeated(s3: Store, make_recipe: Callable[..., Recipe]) -> None:
    put_training_set(s3, {"file0": random_rows(0, 20), "file1": random_rows(1, 20)})
    recipe = make_recipe(epochs=6, held_out_share=0.2, learning_rate=1e-2)
    seen: list[StepMetrics] = []
    checkpoint = train(connect(recipe), Job(), seen.append)
    assert [m.step for m in seen] == list(range(1, checkpoint.steps + 1))
    assert seen[0].loss is not None
    assert checkpoint.final_loss < 0.9 * seen[0].loss
    assert s3.get_record(RunKeys(checkpoint.run).manifest, DrafterCheckpoint) == checkpoint
    assert s3.get_record(LATEST_RUN, RunPointer).run == checkpoint.run
    assert s3.read(checkpoint.weights)
    assert checkpoint.weights.key == RunKeys(checkpoint.run).weights
    assert checkpoint.settings is not None
    as_it_was = Recipe.model_validate_json(s3.read(checkpoint.settings))
    assert as_it_was == recipe, "which recipe: not its name alone"
    assert sum(file.rows for file in checkpoint.coverage) == sum(m.rows for m in seen)
    assert not list(s3.list(RunKeys(checkpoint.run).checkpoints))
    again: list[StepMetrics] = []
    assert train(connect(recipe), Job(), again.append) == checkpoint
    assert not again


def test_what_a_kill_after_the_manifest_left_is_removed_by_the_next_call(
    s3: Store, make_recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    put_training_set(s3, {"file0": random_rows(0, 12)})
    recipe = make_recipe(max_steps=4)
    with monkeypatch.context() as killed:
        killed.setattr(publish, "settle_finished", lambda _files: None)
        checkpoint = train(connect(recipe), Job(), lambda _: None)
    remote = RunKeys(checkpoint.run).checkpoints
    local = recipe.storage.work_dir / LOCAL_RUNS / checkpoint.run / CHECKPOINTS
    assert s3.find_record(LATEST_RUN, RunPointer) is None
    assert list(s3.list(remote))
    assert list(local.iterdir())
    for _ in range(2):
        assert train(connect(recipe), Job(), lambda _: None) == checkpoint
        assert s3.get_record(LATEST_RUN, RunPointer).run == checkpoint.run
        assert not list(s3.list(remote))
        assert not local.exists()


@pytest.mark.parametrize(("published", "step", "expected"), [("best", 1, 9.0), ("last", 2, 7.0)])
def test_the_manifest_tells_the_held_out_prefix_of_the_published_weights(
    s3: Store,
    make_recipe: Callable[..., Recipe],
    monkeypatch: pytest.MonkeyPatch,
    published: Literal["best", "last"],
    step: int,
    expected: float,
) -> None:
    put_training_set(s3, {"file0": random_rows(0, 12)})

    def publish_run(files: RunFiles, made_from: dict[str, Any], result: TrainingResult, *how: Any) -> Any:
        scores = {"held_out_accepted_prefix": 7.0, "best_step": 1, "best_accepted_prefix": 9.0}
        changed = replace(result, progress=replace(result.progress, **scores))
        return publish.publish_run(files, made_from, changed, *how)

    monkeypatch.setattr(module, "publish_run", publish_run)
    recipe = make_recipe(max_steps=2, checkpoint_every_steps=1, publish=published)
    checkpoint = train(connect(recipe), Job(), lambda _: None)
    assert checkpoint.published_step == step
    assert checkpoint.held_out_accepted_prefix == expected
    assert checkpoint.best_accepted_prefix == 9.0


def test_a_failed_gate_stops_training_unless_accepted_by_name(s3: Store, make_recipe: Callable[..., Recipe]) -> None:
    frozen = put_training_set(s3, {"file0": random_rows(0, 8)}, passed=False)
    with pytest.raises(GateError, match="87 % near-empty"):
        train(connect(make_recipe(max_steps=1)), Job(frozen.hash), lambda _: None)
    checkpoint = train(connect(make_recipe(max_steps=1)), Job(frozen.hash, accept_failed_gate=True), lambda _: None)
    assert checkpoint.gate == "accepted although failed"


@pytest.mark.parametrize(("device", "reason"), [("cuda:7", "does not exist here"), ("gpu", "is not a device")])
def test_a_missing_device_is_refused(s3: Store, make_recipe: Callable[..., Recipe], device: str, reason: str) -> None:
    frozen = put_training_set(s3, {"file0": random_rows(0, 8)})
    with pytest.raises(RecipeError, match=reason):
        trained(make_recipe(placement={"targets": [device], "drafters": ["cpu"]}), frozen.hash)


def validated(rows: RowStore, recipe: Recipe) -> list[str]:
    cpu = torch.device("cpu")
    placement = RankPlacement(0, 1, cpu, (cpu,))
    data = make_data(rows, recipe, cast(DrafterConfig, SimpleNamespace(block_size=4)), placement)
    return sorted(row_id for batch in data.held_out for row_id in batch.row_ids)


def test_a_cap_over_two_sources_takes_from_both_and_the_recipes_seed_decides(
    make_recipe: Callable[..., Recipe],
) -> None:
    rows = row_store({"large": random_rows(0, 900), "small": random_rows(1, 300)})
    recipe = make_recipe(held_out_share=0.5, validation_rows=60)
    drawn = validated(rows, recipe)
    assert len(drawn) == 60
    assert abs(sum(name.startswith("file1") for name in drawn) - 15) < 12
    assert drawn == validated(rows, recipe)
    assert drawn != validated(rows, recipe.model_copy(update={"seed": 1}))


def test_a_warm_start_from_an_export_is_bit_equal_and_must_be_whole_and_of_this_tokenizer(
    make_recipe: Callable[..., Recipe], s3: Store, tmp_path: Path
) -> None:
    frozen = put_training_set(s3, {"file0": random_rows(0, 20)})
    first = train(connect(make_recipe(max_steps=1)), Job(frozen.hash), lambda _: None)
    masters = load(s3.read(first.weights))
    for dtype in ("float32", "bfloat16"):
        folder = tmp_path / dtype
        recipe = make_recipe(max_steps=1)
        exported = recipe.export.model_copy(update={"local_dir": folder, "dtype": dtype})
        export_drafter(connect(recipe.model_copy(update={"export": exported})), first.run)
        warm = recipe.model_copy(update={"drafter": recipe.drafter.model_copy(update={"warm_start": folder})})
        config = drafter_config(warm, read_target_config(warm.target.path), None)
        started, _ = make_learner(warm, config, torch.device("cpu"), 1).state()
        for name, master in masters.items():
            assert started[name].dtype == torch.float32
            assert torch.equal(started[name], master.to(getattr(torch, dtype)).float())
    other = tmp_path / "tokenizer"
    shutil.copytree(warm.target.path, other)
    (other / "tokenizer.json").write_text((other / "tokenizer.json").read_text().replace("w95", "w95x"))
    elsewhere = warm.model_copy(update={"tokenization": warm.tokenization.model_copy(update={"tokenizer": other})})
    with pytest.raises(IncompatibleError, match=r"warm_start .* tokenizer\.json of sha256 \w{12}, .* has \w{12}"):
        make_learner(elsewhere, config, torch.device("cpu"), 1)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\0")
    with pytest.raises(IncompatibleError, match=r"its manifest says .* it was damaged or changed"):
        make_learner(warm, config, torch.device("cpu"), 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 48}, "hidden_size = 48, the recipe's drafter 32"),
        ({"vocab_size": 128}, "vocab_size = 128, the recipe's drafter 97"),
        (
            {"dflash_config": {"mask_token_id": 95, "target_layer_ids": [1, 3]}},
            "mask_token_id = 95, the recipe's drafter 96",
        ),
        (
            {"dflash_config": {"mask_token_id": 96, "target_layer_ids": [0, 3]}},
            r"target_layer_ids = \(0, 3\), the recipe's drafter \(1, 3\)",
        ),
        (
            {"dflash_config": {"mask_token_id": 96, "target_layer_ids": [1, 9]}},
            r"target_layer_ids \[1, 9\] must ascend within the target's layers 0\.\.4",
        ),
        ({"dflash_config": {"mask_token_id": 97, "target_layer_ids": [1, 3]}}, "97 is not a row .* which has 97"),
    ],
)
def test_a_warm_start_of_another_network_is_refused_with_both_values(
    make_recipe: Callable[..., Recipe], tmp_path: Path, change: dict[str, object], message: str
) -> None:
    recipe = make_recipe(max_steps=1)
    config = drafter_config(recipe, read_target_config(recipe.target.path), None)
    (tmp_path / "config.json").write_text(json.dumps(config.to_json() | change))
    warm = recipe.model_copy(update={"drafter": recipe.drafter.model_copy(update={"warm_start": tmp_path})})
    with pytest.raises(IncompatibleError, match=message):
        make_learner(warm, config, torch.device("cpu"), 1)


def test_a_warm_start_folder_that_is_not_there_or_lacks_a_file_is_named(
    make_recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    recipe = make_recipe(max_steps=1)
    config = drafter_config(recipe, read_target_config(recipe.target.path), None)
    warm = recipe.model_copy(update={"drafter": recipe.drafter.model_copy(update={"warm_start": tmp_path / "nowhere"})})
    with pytest.raises(IncompatibleError, match=r"nowhere/config\.json cannot be read"):
        make_learner(warm, config, torch.device("cpu"), 1)
    (tmp_path / "nowhere").mkdir()
    (tmp_path / "nowhere" / "config.json").write_text(json.dumps(config.to_json()))
    with pytest.raises(IncompatibleError, match=r"nowhere/model\.safetensors cannot be read"):
        make_learner(warm, config, torch.device("cpu"), 1)


def test_the_probe_measures_what_evaluation_does_and_changes_nothing(
    s3: Store, make_recipe: Callable[..., Recipe]
) -> None:
    frozen = put_training_set(s3, {"file0": random_rows(0, 20), "file1": random_rows(1, 20)})
    settings = {"max_steps": 8, "held_out_share": 0.3, "acceptance_every_steps": 3, "acceptance_prompts": 4}
    recipe = make_recipe(**settings)
    evaluation = recipe.evaluation.model_copy(update={"prompts": 4, "max_new_tokens": 12})
    recipe = recipe.model_copy(update={"evaluation": evaluation})
    checkpoint, seen = trained(recipe, frozen.hash)
    measured = {m.step: m.acceptance_length for m in seen if m.acceptance_length is not None}
    assert list(measured) == [3, 6, 8]
    assert all(value >= 1.0 for value in measured.values())
    report = evaluate_drafter(connect(recipe), checkpoint.run, lambda done, total: None)
    assert measured[8] == pytest.approx(report.acceptance_length, abs=0.05)
    unwatched = recipe.training.model_copy(update={"acceptance_every_steps": 0})
    plain, unprobed = trained(recipe.model_copy(update={"name": "plain", "training": unwatched}), frozen.hash)
    assert plain.weights.sha256 == checkpoint.weights.sha256
    assert all(m.acceptance_length is None for m in unprobed)
    assert [m.loss for m in unprobed] == [m.loss for m in seen]


def test_a_vision_language_target_is_probed_and_evaluated_by_its_text_part(
    s3: Store, make_recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    torch.manual_seed(1)
    FAMILIES["qwen3_5_vision"]().save_pretrained(tmp_path / "vision")
    write_tokenizer(tmp_path / "vision")
    frozen = put_training_set(s3, {"file0": random_rows(0, 20)})
    recipe = make_recipe(max_steps=2, held_out_share=0.3, acceptance_every_steps=2, acceptance_prompts=3)
    recipe = recipe.model_copy(
        update={
            "target": recipe.target.model_copy(update={"path": tmp_path / "vision"}),
            "evaluation": recipe.evaluation.model_copy(update={"prompts": 3, "max_new_tokens": 12}),
        }
    )
    checkpoint, seen = trained(recipe, frozen.hash)
    report = evaluate_drafter(connect(recipe), checkpoint.run, lambda done, total: None)
    assert report.lossless
    assert seen[-1].acceptance_length == pytest.approx(report.acceptance_length)


def test_without_held_out_rows_nothing_is_probed(s3: Store, make_recipe: Callable[..., Recipe]) -> None:
    frozen = put_training_set(s3, {"file0": random_rows(0, 8)})
    recipe = make_recipe(max_steps=2, held_out_share=0.0, acceptance_every_steps=1)
    _, seen = trained(recipe, frozen.hash)
    assert all(m.acceptance_length is None for m in seen)
