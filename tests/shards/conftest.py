"""The tokenizers and recipes of tests/tokenization, on stores of their own."""

from collections.abc import Callable

import pytest

from dflash_core.workspace import Workspace, connect
from tests.tokenization.conftest import MakeRecipe, folders, make_recipe, tokenize_rows, tokenizers

__all__ = ["folders", "make_recipe", "tokenize_rows", "tokenizers"]
Open = Callable[..., Workspace]


@pytest.fixture
def workspace_of(make_recipe: MakeRecipe, bucket: str) -> Open:
    """`workspace_of(family, **keys of [tokenization])`: such a recipe on this test's bucket."""

    def make(family: str = "prefilled", **tokenization: object) -> Workspace:
        return connect(make_recipe(family, bucket, **tokenization))

    return make


@pytest.fixture
def workspace(workspace_of: Open) -> Workspace:
    """One with the recipe's defaults."""
    return workspace_of()
