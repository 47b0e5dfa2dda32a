"""Files of completions, their outcomes and their objects."""

import json
from collections.abc import Iterable

from dflash_core.shards.overlap import FileFailed
from dflash_core.shards.pipeline import tokenize_files
from dflash_core.shards.workers import FileDone
from dflash_core.storage.partitions import list_sources
from dflash_core.storage.s3 import Store
from dflash_core.workspace import Workspace

ROWS = 5
Outcomes = dict[str, FileDone | FileFailed]


def rows(name: str, count: int = ROWS) -> bytes:
    """A file of which every row differs from every other."""
    made = [{"id": f"{name}-{i}", "prompt": f"q {i}", "completion": f"the answer {name} {i}"} for i in range(count)]
    return "".join(json.dumps(row) + "\n" for row in made).encode()


def tokenized(workspace: Workspace) -> Outcomes:
    """What becomes of every file of the source, by partition."""
    return by_partition(tokenize_files(workspace, list_sources(workspace.source)))


def by_partition(outcomes: Iterable[FileDone | FileFailed]) -> Outcomes:
    return {outcome.source.partition: outcome for outcome in outcomes}


def failed(outcomes: Outcomes) -> dict[str, str]:
    """Partition -> why."""
    return {p: outcome.reason for p, outcome in outcomes.items() if isinstance(outcome, FileFailed)}


def done_again(outcomes: Outcomes) -> set[str]:
    """Those that were not skipped."""
    return {p for p, outcome in outcomes.items() if isinstance(outcome, FileDone) and not outcome.skipped}


def objects(derived: Store) -> dict[str, bytes]:
    return {listed.key: derived.get(listed.key).body for listed in derived.list()}
