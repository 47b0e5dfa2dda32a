"""A recipe is validated once, at the border: a misspelt key, a wrong value or a missing file is one sentence."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, get_args

import pytest
from pydantic import ValidationError

from dflash_core.errors import RecipeError
from dflash_core.recipe import Recipe, Use, load_recipe, settings_hash
from dflash_core.recipe.base import EVERYTHING, Decides, DecidesNothing, Section, settings_for

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
        ("this is not TOML", "cannot be read"),
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
        with pytest.raises(RecipeError, match=rf"storage \('{storage}'\) must not be inside {named} \("):
            load_recipe(path)


def test_a_whole_bucket_as_source_keeps_what_is_derived_elsewhere(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"storage \('derived/'\) must not be inside source \(''\)"):
        load_recipe(written(tmp_path, MINIMAL.replace('"b"', '"a"\nprefix = "derived/"')))


class Forgotten(Section):
    """A table of which nobody has said what it decides."""

    plain: int = 1
    nothing: Annotated[int, DecidesNothing] = 2
    some: Annotated[int, Decides("weights", "answers")] = 3
    unset: int | None = None


class Quiet(Section):
    """One that says it for all its fields, but for one."""

    decides: ClassVar[tuple[Use, ...]] = ("rows",)
    plain: int = 4
    loud: Annotated[int, Decides("acceptance")] = 5


class Whole(Section):
    """Tables in a table, one of them cut down by its mark."""

    forgotten: Forgotten = Forgotten()
    quiet: Quiet = Quiet()
    narrow: Annotated[Forgotten, Decides("rows")] = Forgotten()
    absent: Forgotten | None = None


@pytest.mark.parametrize("use", EVERYTHING)
def test_a_setting_that_nobody_thought_about_decides_everything(use: Use) -> None:
    assert settings_for(Forgotten(), use)["plain"] == 1
    expected = {"plain": 1} | ({"some": 3} if use in ("weights", "answers") else {})
    assert settings_for(Forgotten(), use) == expected
    assert settings_for(Forgotten(unset=7), use) == expected | {"unset": 7}


@pytest.mark.parametrize("use", EVERYTHING)
def test_a_table_speaks_for_its_fields_and_a_mark_for_one(use: Use) -> None:
    found = settings_for(Whole(), use)
    assert {name: value for name, value in found.items() if name.startswith("quiet.")} == {
        "rows": {"quiet.plain": 4},
        "acceptance": {"quiet.loud": 5},
    }.get(use, {})
    assert found["forgotten.plain"] == 1
    assert ("narrow.plain" in found) == (use == "rows")
    assert not any(name.startswith("absent") for name in found)


FULL: dict[str, Any] = {
    "name": "run",
    "source": {"bucket": "a", "prefix": "in/"},
    "storage": {"bucket": "b"},
    "target": {"path": "model"},
    "generation": {
        "prompts": {"bucket": "a", "prefix": "p/"},
        "servers": ["http://host/v1"],
        "model": "tiny",
    },
}
CANDIDATES: tuple[Any, ...] = (
    *(True, False, 1, 2, 3, 7, 64, 0.25, 0.5, 1.5, "other", "0 3 * * *", "http://other.example/v1"),
    *(("other",), ("cuda:0",), (0.1, 0.2), (1, 2), {"enable_thinking": True}),
)
"""Tried in turn for another value of a setting; a setting that takes none of them needs one more here."""
THROUGH: dict[str, set[Use]] = {
    "drafter.block_size": {"rows"},  # the fewest supervised tokens, where the recipe does not say them
    "training.batch_rows": {"weights"},  # rows of a step
    "training.accumulation": {"weights"},
}
"""What settings decide through another one that follows from them."""


def fields(section: Section, uses: frozenset[Use] = frozenset(EVERYTHING)) -> Iterator[tuple[str, frozenset[Use]]]:
    """Every setting by its full name, and what it says that it decides."""
    for name, field in type(section).model_fields.items():
        value, marks = getattr(section, name), [mark for mark in field.metadata if isinstance(mark, Decides)]
        if isinstance(value, Section):
            for below, own in fields(value, uses & set(marks[0].uses) if marks else uses):
                yield f"{name}.{below}", own
        else:
            yield name, uses & set(marks[0].uses if marks else section.decides)


SAID = dict(fields(Recipe.model_validate(FULL)))


def changed(recipe: Recipe, name: str) -> Recipe:
    """The recipe with another value of this setting."""
    for candidate in (*CANDIDATES, *literals(recipe, name)):
        table = recipe.model_dump()
        *above, last = name.split(".")
        place = table
        for key in above:
            place = place[key]
        place[last] = candidate
        try:
            other = Recipe.model_validate(table)
        except ValidationError:
            continue
        if other != recipe:
            return other
    raise AssertionError(f"{name} takes none of the candidates; add one")


def literals(recipe: Recipe, name: str) -> tuple[Any, ...]:
    """The words that a setting may be."""
    *above, last = name.split(".")
    section: Any = recipe
    for key in above:
        section = getattr(section, key)
    kind = type(section).model_fields[last].annotation
    return (*get_args(kind), *((word,) for part in get_args(kind) for word in get_args(part)))


@pytest.mark.parametrize("name", SAID)
def test_each_setting_decides_exactly_what_it_says(name: str) -> None:
    recipe = Recipe.model_validate(FULL)
    other = changed(recipe, name)
    decided = {use for use in EVERYTHING if recipe.settings_for(use) != other.settings_for(use)}
    assert decided == SAID[name] | THROUGH.get(name, set())


DECIDING: dict[Use, set[str]] = {
    "rows": {
        *("tokenization.max_length", "tokenization.truncation", "tokenization.turns", "tokenization.repeats"),
        *("tokenization.truncated_thinking", "tokenization.supervise_empty_thought"),
        *("tokenization.min_supervised_tokens", "tokenization.template_options"),
    },
    "acceptance": {
        *("seed", "target.dtype", "training.held_out_share", "tokenization.template_options"),
        *(f"evaluation.{name}" for name in ("prompts", "max_new_tokens", "temperature", "ngram", "block_size")),
        *(f"evaluation.{name}" for name in ("timed_prompts", "batch", "cut_temperatures", "cut_prompts")),
    },
    "answers": {
        *("seed", "tokenization.template_options", "generation.model"),
        *(f"generation.sampling.{name}" for name in ("max_tokens", "temperature", "top_p", "top_k", "min_p")),
        *(f"generation.sampling.{name}_penalty" for name in ("presence", "frequency", "repetition")),
    },
    "kept answers": {
        "generation.answers_in_prompts",
        *(f"generation.outcomes.{name}" for name in ("truncated", "empty", "loop", "duplicate", "retries")),
        *(f"generation.outcomes.{name}" for name in ("more_tokens", "max_bad_share", "enough_answers")),
    },
    "weights": {
        *("seed", "target.layer_ids", "target.layers", "target.dtype"),
        *(f"drafter.{name}" for name in ("block_size", "num_layers", "mask_token_id", "hidden_size", "head_dim")),
        *(f"drafter.{name}" for name in ("intermediate_size", "num_attention_heads", "num_key_value_heads")),
        *(f"drafter.{name}" for name in ("rope_theta", "sliding_window", "sliding_layers")),
        *(f"training.{name}" for name in ("epochs", "max_steps", "anchors", "learning_rate", "warmup_share")),
        *(f"training.{name}" for name in ("weight_decay", "betas", "clip", "schedule", "loss", "gamma", "dpace_alpha")),
        *(f"training.{name}" for name in ("held_out_share", "publish", "autocast")),
    },
}


@pytest.mark.parametrize("use", EVERYTHING)
def test_what_decides_is_what_is_meant_to(use: Use) -> None:
    """A new setting is in one of these sets, or says that it decides nothing."""
    assert {name for name, uses in SAID.items() if use in uses} == DECIDING[use]


def test_how_the_rows_of_a_step_are_shared_out_decides_nothing() -> None:
    def weights(batch_rows: int, accumulation: int, drafters: int) -> dict[str, Any]:
        devices = ["cpu"] * drafters
        training = {"batch_rows": batch_rows, "accumulation": accumulation}
        given = {**training, "placement": {"targets": devices, "drafters": devices}}
        return Recipe.model_validate(FULL | {"training": given}).settings_for("weights")

    assert weights(8, 1, 1) == weights(4, 2, 1) == weights(4, 1, 2) == weights(2, 2, 2)
    assert weights(8, 1, 1) != weights(8, 1, 2)


def test_what_another_table_decides_counts_as_it_is() -> None:
    """The fewest supervised tokens and gamma follow from the block size unless the recipe says them."""
    plain = Recipe.model_validate(FULL)
    said = FULL | {"tokenization": {"min_supervised_tokens": 32}, "training": {"gamma": 7.0}}
    for use in ("rows", "weights"):
        assert Recipe.model_validate(said).settings_for(use) == plain.settings_for(use)
        smaller = Recipe.model_validate(FULL | {"drafter": {"block_size": 8}})
        assert smaller.settings_for(use) != plain.settings_for(use)
    small = Recipe.model_validate(said | {"drafter": {"block_size": 8}})
    assert small.settings_for("rows") == plain.settings_for("rows")


def test_no_secret_is_hashed_kept_or_shown() -> None:
    secret = {
        "alerts": {"webhook_url": "https://hooks.example.com/SECRET", "ui_url": "http://ui/SECRET"},
        "generation": {
            **FULL["generation"],
            "servers": ["http://me:SECRET@host/v1", "http://other/v1?key=SECRET"],
            "api_key_variable": "THE_KEY",
        },
        "storage": {**FULL["storage"], "endpoint_url": "http://SECRET.example"},
    }
    recipe, plain = Recipe.model_validate(FULL | secret), Recipe.model_validate(FULL)
    for use in EVERYTHING:
        assert "SECRET" not in json.dumps(recipe.settings_for(use))
        assert recipe.settings_for(use) == plain.settings_for(use)
    kept = recipe.without_secrets().decode()
    assert "SECRET" not in kept.replace("http://SECRET.example", ""), "a store's address has no secret in it"
    assert "hooks" not in kept
    assert "hooks.example.com" not in repr(recipe)
    assert "hooks.example.com" not in recipe.model_dump_json()


def test_the_hash_is_of_names_values_and_what_else_is_given_in_any_order() -> None:
    settings: dict[str, Any] = {"b": [1, 2.5], "a": None}
    whole = settings_hash(settings, {"code": "1", "tokenizer": "t"})
    assert whole == settings_hash({"a": None, "b": [1, 2.5]}, {"tokenizer": "t", "code": "1"})
    assert len(whole) == 64
    others = [
        settings_hash(settings, {"code": "2", "tokenizer": "t"}),
        settings_hash(settings | {"a": 0}, {"code": "1", "tokenizer": "t"}),
        settings_hash(settings | {"code": "1"}, {"tokenizer": "t"}),
        settings_hash({"b": [1, 2.5]}, {"code": "1", "tokenizer": "t"}),
    ]
    assert len({whole, *others}) == 5
