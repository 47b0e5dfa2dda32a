"""A tokenizer folder is read as serving reads it; the fingerprint changes with all that changes ids or masks only."""

import json
from pathlib import Path

import numpy as np
import pytest

from dflash_core.errors import RecipeError
from dflash_core.tokenization.adversarial import adversarial_texts
from dflash_core.tokenization.backends import HuggingFaceBackend
from dflash_core.tokenization.tokenizer import fingerprint

BYTE_LEVEL = ("prefilled", "llama", "end in next")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"tokenizer.json": None}, r"holds no tokenizer\.json"),
        ({"tokenizer.json": "{}"}, "is not a tokenizer"),
        ({"tokenizer_config.json": "{}"}, "has no chat template; set tokenization.chat_template"),
        ({"tokenizer_config.json": "nonsense"}, "is not JSON"),
        (
            {
                "tokenizer_config.json": json.dumps(
                    {"chat_template": "x", "added_tokens_decoder": {"9": {"content": "q"}}}
                )
            },
            "do not belong together",
        ),
    ],
)
def test_an_unusable_folder_is_refused_in_one_sentence(
    folders: dict[str, Path], load_chat, tmp_path: Path, change: dict[str, str | None], sentence: str
) -> None:
    for file in folders["chatml"].iterdir():
        (tmp_path / file.name).write_text(file.read_text(encoding="utf8"), encoding="utf8")
    for name, content in change.items():
        (tmp_path / name).unlink() if content is None else (tmp_path / name).write_text(content)
    with pytest.raises(RecipeError, match=sentence):
        load_chat("chatml", tokenizer=tmp_path)


def test_a_folder_that_does_not_exist_is_named(load_chat) -> None:
    with pytest.raises(RecipeError, match="nowhere does not exist"):
        load_chat("chatml", tokenizer=Path("nowhere"))


def test_tokens_that_only_the_configuration_adds_are_added(folders: dict[str, Path], load_chat, tmp_path) -> None:
    for file in folders["chatml"].iterdir():
        (tmp_path / file.name).write_text(file.read_text(encoding="utf8"), encoding="utf8")
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    number = load_chat("chatml").vocabulary
    config["added_tokens_decoder"] = {str(number): {"content": "<|new|>", "special": True}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_chat("chatml", tokenizer=tmp_path)
    assert tokenizer.added["<|new|>"] == number
    assert "<|new|>" in tokenizer.special


@pytest.mark.parametrize("family", BYTE_LEVEL)
def test_texts_are_cut_only_where_a_cut_changes_nothing(load_chat, family: str) -> None:
    tokenizer = load_chat(family)
    cuttable = tokenizer.cuttable
    assert cuttable == frozenset(tokenizer.added)
    encode = HuggingFaceBackend(tokenizer.reference).encode
    texts = adversarial_texts(())
    for token in cuttable:
        whole, offsets = encode([a + token + b for a, b in zip(texts, texts[::-1], strict=True)])
        before, cuts = encode([a + token for a in texts])
        after, ends = encode(texts[::-1])
        for i in range(len(texts)):
            parts = np.concatenate([before[cuts[i] : cuts[i + 1]], after[ends[i] : ends[i + 1]]])
            assert whole[offsets[i] : offsets[i + 1]].tolist() == parts.tolist()


def test_a_tokenizer_that_looks_across_is_never_cut(load_chat) -> None:
    assert load_chat("sentencepiece").cuttable == frozenset()


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
    same.write_text(json.loads((tmp_path / "tokenizer_config.json").read_text())["chat_template"])
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
