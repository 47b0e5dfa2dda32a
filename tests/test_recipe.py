"""A recipe is validated once, at the border: a misspelt key, a wrong value or a missing file is one sentence."""

import json
from pathlib import Path

import pytest

from dflash_core.errors import RecipeError
from dflash_core.recipe import Recipe, load_recipe

REPOSITORY = Path(__file__).resolve().parent.parent
MINIMAL = """
name = "run"
[source]
bucket = "a"
[storage]
bucket = "b"
[target]
path = "model"
"""


@pytest.mark.parametrize("path", sorted((REPOSITORY / "recipes").glob("*.toml")), ids=lambda path: path.name)
def test_the_recipes_in_the_tree_are_valid(path: Path) -> None:
    assert load_recipe(path).name == path.stem


def written(folder: Path, text: str) -> Path:
    path = folder / "recipe.toml"
    path.write_text(text)
    return path


def test_the_recipe_that_is_kept_holds_no_secret_and_is_one_again(tmp_path: Path) -> None:
    secret = '[alerts]\nwebhook_url = "https://hooks.example.com/SECRET"\n'
    secret += (
        '[generation]\nservers = ["http://me:SECRET@host/v1"]\nmodel = "m"\nprompts = {bucket = "a", prefix = "p/"}\n'
    )
    recipe = load_recipe(written(tmp_path, MINIMAL.replace('bucket = "a"', 'bucket = "a"\nprefix = "in/"') + secret))
    kept = recipe.without_secrets()
    assert b"SECRET" not in kept
    assert b"hooks" not in kept
    found = json.loads(kept)
    assert found["generation"]["prompts"] == {"bucket": "a", "prefix": "p/"}
    del found["generation"]
    assert Recipe.model_validate(found).training == recipe.training


def test_defaults_follow_the_block_size(tmp_path: Path) -> None:
    recipe = load_recipe(written(tmp_path, MINIMAL + "[drafter]\nblock_size = 8\n"))
    assert (recipe.min_supervised_tokens, recipe.gamma) == (16, 4.0)
    assert str(recipe.tokenizer_path) == "model"


@pytest.mark.parametrize(
    ("extra", "sentence"),
    [
        ("[tokenization]\nmax_lenght = 5\n", r"tokenization\.max_lenght: no such key; check its spelling"),
        ("[trianing]\n", r"trianing: no such key"),
        ("[training]\nepochs = 0\n", r"training\.epochs: .*greater than 0"),
        ("[gate]\nmin_coverage = 1.5\n", r"gate\.min_coverage: .*less than or equal to 1"),
        (
            '[training.placement]\ntargets = ["cuda:0", "cuda:1", "cuda:2"]\ndrafters = ["cuda:3", "cuda:4"]\n',
            "3 targets",
        ),
        ('[alerts]\nwebhook_url = "file:///etc/secret"\n', r"alerts\.webhook_url: .*must be an http\(s\) address"),
        ("this is no toml", "cannot be read"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, extra: str, sentence: str) -> None:
    with pytest.raises(RecipeError, match=sentence) as refused:
        load_recipe(written(tmp_path, MINIMAL + extra))
    assert "recipe.toml" in str(refused.value)
    assert "secret" not in str(refused.value)


def test_a_missing_recipe_is_named(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"nowhere\.toml does not exist"):
        load_recipe(tmp_path / "nowhere.toml")


PLACES = """
name = "run"
[target]
path = "model"
[source]
bucket = "a"
prefix = "{source}"
[storage]
bucket = "{bucket}"
prefix = "{storage}"
[generation]
prompts = {{ bucket = "a", prefix = "{prompts}" }}
servers = ["http://127.0.0.1:8000/v1"]
model = "tiny"
"""


@pytest.mark.parametrize(
    ("bucket", "source", "storage", "prompts", "named"),
    [
        ("a", "completions/", "derived/", "prompts/", None),
        ("a", "completions/", "", "prompts/", None),
        ("b", "completions/", "completions/", "prompts/", None),
        ("a", "completions/", "completions/derived/", "prompts/", "source"),
        ("a", "completions/", "prompts/derived/", "prompts/", r"generation\.prompts"),
        ("a", "completions/", "completions/", "prompts/", "source"),
    ],
)
def test_what_is_derived_is_never_read_as_input(
    tmp_path: Path, bucket: str, source: str, storage: str, prompts: str, named: str | None
) -> None:
    path = written(tmp_path, PLACES.format(bucket=bucket, source=source, storage=storage, prompts=prompts))
    if named is None:
        load_recipe(path)
    else:
        with pytest.raises(RecipeError, match=rf"storage \('{storage}'\) must not lie in {named} \("):
            load_recipe(path)


def test_a_whole_bucket_as_source_keeps_what_is_derived_elsewhere(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"storage \('derived/'\) must not lie in source \(''\)"):
        load_recipe(written(tmp_path, MINIMAL.replace('"b"', '"a"\nprefix = "derived/"')))
