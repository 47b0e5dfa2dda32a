"""The command line: one file for each half of the commands, and what they share."""

from dflash_core.cli import data, drafter
from dflash_core.cli.app import DEFAULT_RECIPE, RecipeOption, app, main, open_recipe

__all__ = ["DEFAULT_RECIPE", "RecipeOption", "app", "data", "drafter", "main", "open_recipe"]
