"""What assets are given: the recipe of this code location."""

from pathlib import Path

import dagster as dg

from dflash_core.errors import UserError
from dflash_core.recipe import Recipe, load_recipe


class RecipeResource(dg.ConfigurableResource):  # type: ignore[type-arg]
    """One recipe file, validated when an asset asks for it."""

    path: str

    def load(self) -> Recipe:
        """The recipe.

        Raises:
            dg.Failure: it cannot be used; the sentence says why.
        """
        try:
            return load_recipe(Path(self.path))
        except UserError as error:
            raise dg.Failure(str(error), allow_retries=False) from None
