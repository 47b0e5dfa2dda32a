"""The one partitions definition: a partition is a source file with completions, or the prompts that will become one."""

from collections.abc import Sequence
from dataclasses import dataclass

import dagster as dg

from dflash_core.recipe import Recipe
from dflash_core.records import SourceFile
from dflash_core.storage.store import find_files, list_sources, open_stores

NAME = "completion_files"
completion_files = dg.DynamicPartitionsDefinition(name=NAME)


@dataclass(frozen=True)
class Synced:
    """What a look at the bucket found."""

    sources: tuple[SourceFile, ...]
    added: tuple[str, ...]
    vanished: tuple[str, ...]
    """Partitions without completions and prompts. They are kept: a drafter may have been trained on them."""


def sync_partitions(instance: dg.DagsterInstance, recipe: Recipe) -> Synced:
    """Make every file of completions or prompts a partition of this instance.

    Raises:
        StorageError: the bucket cannot be listed or holds neither completions nor prompts.
    """
    stores = open_stores(recipe)
    prompts = [] if stores.prompts is None else find_files(stores.prompts)
    sources = find_files(stores.source) if prompts else list_sources(stores.source)
    known = set(instance.get_dynamic_partitions(NAME))
    found = sorted({file.partition for file in [*sources, *prompts]})
    added = [partition for partition in found if partition not in known]
    if added:
        instance.add_dynamic_partitions(NAME, added)
    return Synced(tuple(sources), tuple(added), tuple(sorted(known - set(found))))


def sources_of(recipe: Recipe, partitions: Sequence[str]) -> tuple[list[SourceFile], list[str]]:
    """The source files of these partitions as the bucket has them now, and the partitions that have none any more."""
    wanted = set(partitions)
    sources = [source for source in list_sources(open_stores(recipe).source) if source.partition in wanted]
    return sources, sorted(wanted - {source.partition for source in sources})
