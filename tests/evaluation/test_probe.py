"""Acceptance during training: what the evaluation would measure, without changing the training by a bit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_core.evaluation.evaluate import evaluate_drafter
from dflash_core.evaluation.probe import acceptance_probe
from dflash_core.recipe import Recipe
from dflash_core.records import DrafterCheckpoint
from dflash_core.storage.store import Store
from dflash_core.training.metrics import StepMetrics
from dflash_core.training.run import train_drafter
from tests.training.conftest import put_training_set, random_rows, write_tokenizer
from tests.training.test_target import FAMILIES


def trained(recipe: Recipe, training_set: str, make_probe: Any) -> tuple[DrafterCheckpoint, list[StepMetrics]]:
    seen: list[StepMetrics] = []
    return train_drafter(recipe, training_set, False, seen.append, None, make_probe), seen


def test_the_probe_measures_what_evaluation_does_and_changes_nothing(
    s3: Store, make_recipe: Callable[..., Recipe]
) -> None:
    frozen = put_training_set(s3, {"file0": random_rows(0, 20), "file1": random_rows(1, 20)})
    settings = {"max_steps": 8, "held_out_share": 0.3, "acceptance_every_steps": 3, "acceptance_prompts": 4}
    recipe = make_recipe(**settings)
    evaluation = recipe.evaluation.model_copy(update={"prompts": 4, "max_new_tokens": 12})
    recipe = recipe.model_copy(update={"evaluation": evaluation})
    checkpoint, seen = trained(recipe, frozen.hash, acceptance_probe)
    measured = {m.step: m.acceptance_length for m in seen if m.acceptance_length is not None}
    assert list(measured) == [3, 6, 8]
    assert all(value >= 1.0 for value in measured.values())
    report = evaluate_drafter(recipe, checkpoint.run, lambda done, total: None)
    assert measured[8] == pytest.approx(report.acceptance_length, abs=0.05)
    plain, unprobed = trained(recipe.model_copy(update={"name": "plain"}), frozen.hash, None)
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
    checkpoint, seen = trained(recipe, frozen.hash, acceptance_probe)
    report = evaluate_drafter(recipe, checkpoint.run, lambda done, total: None)
    assert report.lossless
    assert seen[-1].acceptance_length == pytest.approx(report.acceptance_length)


def test_without_held_out_rows_nothing_is_probed(s3: Store, make_recipe: Callable[..., Recipe]) -> None:
    frozen = put_training_set(s3, {"file0": random_rows(0, 8)})
    recipe = make_recipe(max_steps=2, held_out_share=0.0, acceptance_every_steps=1)
    _, seen = trained(recipe, frozen.hash, acceptance_probe)
    assert all(m.acceptance_length is None for m in seen)
