"""What training draws from the rows of several files."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import torch

from dflash_core.batches.cache import RowStore
from dflash_core.drafter.config import DrafterConfig
from dflash_core.recipe import Recipe
from dflash_core.training.placement import RankPlacement
from dflash_core.training.setup import make_data
from tests.training.conftest import random_rows, row_store


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
