"""The one partitions definition: a partition is a source file with completions, or the prompts that will become one.

Dagster gives a run one key or one contiguous range of keys, in the order in which they were added. New files are added
together, so they stand together; scattered keys cost a run per range.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, groupby

import dagster as dg

from dflash_core.records import SourceFile
from dflash_core.storage.partitions import find_files, list_sources
from dflash_core.workspace import Workspace

NAME = "completion_files"
FILES_PER_RUN = 250
"""Small enough to lose little with a run, large enough that starting it costs nothing compared with its work."""
ADDED_AT_ONCE = 5000
"""SQLite takes 32,766 values in a statement."""
RANGE_START, RANGE_END = "dagster/asset_partition_range_start", "dagster/asset_partition_range_end"
completion_files = dg.DynamicPartitionsDefinition(name=NAME)


@dataclass(frozen=True)
class Synced:
    """What a look at the bucket found."""

    sources: tuple[SourceFile, ...]
    added: tuple[str, ...]
    vanished: tuple[str, ...]
    """Partitions without completions and prompts. They are kept: a drafter may have been trained on them."""


def sync_partitions(instance: dg.DagsterInstance, workspace: Workspace) -> Synced:
    """Make every file of completions or prompts a partition of this instance.

    Raises:
        StorageError: the bucket cannot be listed or holds neither completions nor prompts.
    """
    prompts = [] if workspace.prompts is None else find_files(workspace.prompts)
    sources = find_files(workspace.source) if prompts else list_sources(workspace.source)
    known = set(instance.get_dynamic_partitions(NAME))
    found = sorted({file.partition for file in [*sources, *prompts]})
    added = [partition for partition in found if partition not in known]
    remember(instance, NAME, added)
    return Synced(tuple(sources), tuple(added), tuple(sorted(known - set(found))))


def remember(instance: dg.DagsterInstance, name: str, keys: Sequence[str]) -> None:
    """Add keys to one of the instance's sets of partitions."""
    for first in range(0, len(keys), ADDED_AT_ONCE):
        instance.add_dynamic_partitions(name, keys[first : first + ADDED_AT_ONCE])


def sources_of(workspace: Workspace, partitions: Sequence[str]) -> tuple[list[SourceFile], list[str]]:
    """The source files of these partitions as the bucket has them now, and the partitions that have none any more."""
    wanted = set(partitions)
    sources = [source for source in list_sources(workspace.source) if source.partition in wanted]
    return sources, sorted(wanted - {source.partition for source in sources})


def ranges_of(instance: dg.DagsterInstance, wanted: Collection[str]) -> list[list[str]]:
    """Wanted partitions in as few ranges as there are: contiguous ones together, at most FILES_PER_RUN in each."""
    chosen = set(wanted)
    places = [(i, key) for i, key in enumerate(instance.get_dynamic_partitions(NAME)) if key in chosen]
    counter = count()
    ranges = []
    for _, neighbours in groupby(places, key=lambda place: place[0] - next(counter)):
        keys = [key for _, key in neighbours]
        ranges += [keys[first : first + FILES_PER_RUN] for first in range(0, len(keys), FILES_PER_RUN)]
    return ranges


def range_request(
    keys: Sequence[str], run_key: str | None = None, tags: Mapping[str, str] | None = None
) -> dg.RunRequest:
    """One run over neighbouring partitions."""
    return dg.RunRequest(run_key=run_key, tags={**(tags or {}), RANGE_START: keys[0], RANGE_END: keys[-1]})
