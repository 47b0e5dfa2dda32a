"""What an acceptance probe is given; the probe itself decodes, which is a later stage's work."""

from collections.abc import Callable
from typing import NamedTuple

from torch import nn

from dflash_core.batches.cache import RowStore
from dflash_core.batches.order import Rows
from dflash_core.drafter.model import Drafter
from dflash_core.drafter.target_files import Head
from dflash_core.recipe import Recipe


class Probed(NamedTuple):
    """A drafter in training, and what it is measured with."""

    recipe: Recipe
    model: nn.Module
    """The whole target, a Hugging Face causal LM."""
    drafter: Drafter
    head: Head
    """On the drafter's device."""
    rows: RowStore
    held_out: Rows


Probe = Callable[[], float]
"""Measures the acceptance length now."""
MakeProbe = Callable[[Probed], Probe]
