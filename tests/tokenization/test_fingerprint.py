"""The fingerprint changes with everything that changes ids or masks, and with nothing else."""

from pathlib import Path

import pytest

from dflash_core.tokenization.fingerprint import fingerprint


@pytest.mark.parametrize(
    "change",
    [
        {"max_length": 100},
        {"truncation": "drop"},
        {"turns": "last"},
        {"truncated_thinking": "reject"},
        {"supervise_empty_thought": False},
        {"min_supervised_tokens": 7},
        {"repeats": "drop"},
        {"template_options": {"enable_thinking": False}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_changes_ids_or_masks_changes_it(make_recipe, change: dict[str, object]) -> None:
    assert fingerprint(make_recipe(**change)) != fingerprint(make_recipe())


@pytest.mark.parametrize(
    "change", [{"backend": "huggingface"}, {"workers": 7}, {"audit_share": 0.5}, {"bucket": "other"}], ids=str
)
def test_what_changes_only_how_it_is_done_does_not(make_recipe, change: dict[str, object]) -> None:
    assert fingerprint(make_recipe(**change)) == fingerprint(make_recipe())


def test_template_and_tokenizer_count_by_content_not_by_path(make_recipe, folders, tmp_path: Path) -> None:
    for file in folders["prefilled"].iterdir():
        (tmp_path / file.name).write_text(file.read_text(encoding="utf8"), encoding="utf8")
    assert fingerprint(make_recipe(tokenizer=tmp_path)) == fingerprint(make_recipe())
    same = tmp_path / "same.jinja"
    same.write_text(__import__("json").loads((tmp_path / "tokenizer_config.json").read_text())["chat_template"])
    assert fingerprint(make_recipe(chat_template=same)) == fingerprint(make_recipe())
    same.write_text(same.read_text() + " ")
    assert fingerprint(make_recipe(chat_template=same)) != fingerprint(make_recipe())
    file = tmp_path / "tokenizer.json"
    file.write_text(file.read_text().replace("<|image_pad|>", "<|picture|>"))
    assert fingerprint(make_recipe(tokenizer=tmp_path)) != fingerprint(make_recipe())


def test_the_block_size_counts_through_the_minimum_it_sets(make_recipe) -> None:
    recipe = make_recipe(min_supervised_tokens=None)
    other = recipe.model_copy(update={"drafter": recipe.drafter.model_copy(update={"block_size": 4})})
    assert fingerprint(recipe) != fingerprint(other)
