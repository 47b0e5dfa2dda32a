"""What a generation works on: the recipe's section, the key from the border, the files of prompts."""

from collections.abc import Mapping, Sequence

from pydantic import SecretStr

from dflash_core.completions.generation.answers import Plan
from dflash_core.completions.generation.work import find_valid
from dflash_core.errors import RecipeError
from dflash_core.recipe import Generation, Recipe
from dflash_core.records import GeneratedFile, SourceFile
from dflash_core.storage.store import find_files, open_stores


def generation_of(recipe: Recipe) -> Generation:
    """The recipe's section.

    Raises:
        RecipeError: it has none.
    """
    if recipe.generation is None:
        raise RecipeError(f"recipe {recipe.name!r} has no [generation]; add prompts, servers and model to generate")
    return recipe.generation


def plan_of(recipe: Recipe) -> Plan:
    """What the recipe says about requests and answers.

    Raises:
        RecipeError: it has no [generation].
    """
    return Plan(generation_of(recipe), recipe.seed, recipe.tokenization.template_options)


def with_servers(recipe: Recipe, servers: Sequence[str]) -> Recipe:
    """The recipe with these base URLs instead of its own; none: as it is.

    Raises:
        RecipeError: it has no [generation].
    """
    generation = generation_of(recipe)
    if not servers:
        return recipe
    return recipe.model_copy(update={"generation": generation.model_copy(update={"servers": tuple(servers)})})


def api_key(recipe: Recipe, environment: Mapping[str, str]) -> SecretStr | None:
    """The servers' key, from the variable that the recipe names; None: they want none.

    Raises:
        RecipeError: the variable is not set.
    """
    variable = generation_of(recipe).api_key_variable
    if variable is None:
        return None
    if not environment.get(variable):
        raise RecipeError(f"generation.api_key_variable names {variable}, which is not set; set it to the servers' key")
    return SecretStr(environment[variable])


def list_prompts(recipe: Recipe) -> list[SourceFile]:
    """Every file of prompts, sorted by partition; none without a [generation] section.

    Raises:
        StorageError: the listing fails.
    """
    prompts = open_stores(recipe).prompts
    return [] if prompts is None else find_files(prompts)


def find_generated(recipe: Recipe, source: SourceFile) -> GeneratedFile | None:
    """The manifest of this file of prompts if its completions are complete and valid: generating would skip it."""
    return find_valid(open_stores(recipe), source, plan_of(recipe))
