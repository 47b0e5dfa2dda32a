"""All files of a run: tokenized and stored, or verified; each reported the moment it is done."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from dflash_core.completions.read import CompletionFile
from dflash_core.errors import UserError
from dflash_core.records import Reject, ShardManifest, SourceFile
from dflash_core.shards.overlap import FileFailed, InFlight, all_of, overlap, read_source
from dflash_core.shards.state import read_statistics, shard_states
from dflash_core.shards.tokenize_file import FileTokenizer
from dflash_core.shards.workers import FileDone, tokenize_here, tokenize_in_workers
from dflash_core.storage.s3 import Download, Store
from dflash_core.tokenization.tokenizer import fingerprint
from dflash_core.workspace import Workspace


@dataclass(frozen=True)
class FileVerified:
    """A file that was read whole, nothing written."""

    source: SourceFile
    sha256: str
    rows_read: int
    rejects: tuple[Reject, ...]


def tokenize_files(workspace: Workspace, sources: Sequence[SourceFile]) -> Iterator[FileDone | FileFailed]:
    """Tokenize and store files; yields each as soon as it is done, in any order. What is valid already is skipped.

    Raises:
        RecipeError: the tokenizer or its chat template is unusable.
        StorageError: the store cannot be reached.
    """
    recipe, derived = workspace.recipe, workspace.derived
    pending: list[SourceFile] = []
    for state in shard_states(derived, fingerprint(recipe), sources, recipe.storage.downloads):
        # A file of which no row survived failed then and is to fail again, with its reasons.
        done = _skipped(derived, state.manifest) if state.problem is None and state.manifest is not None else None
        if done is None:
            pending.append(state.source)
        else:
            yield done
    order = {source.partition: i for i, source in enumerate(sources)}
    pending.sort(key=lambda source: order[source.partition])
    limits = InFlight(recipe.storage.downloads, recipe.storage.uploads)
    # No process may be left without a transfer of its own.
    cores = recipe.tokenization.workers or len(os.sched_getaffinity(0))
    processes = min(cores, len(pending), limits.downloads, limits.uploads)
    if processes > 1:
        yield from tokenize_in_workers(workspace, pending, processes, limits.share(processes))
    elif pending:
        yield from tokenize_here(workspace, FileTokenizer(recipe), pending, limits)


def verify_files(workspace: Workspace, sources: Sequence[SourceFile]) -> Iterator[FileVerified | FileFailed]:
    """Read every file whole and count its rows and rejects; writes nothing."""
    turns = workspace.recipe.tokenization.turns

    def verify(source: SourceFile, body: Download) -> FileVerified:
        rows, rejects = 0, []
        for item in CompletionFile(body.body, source.uri, turns):
            if isinstance(item, Reject):
                rejects.append(item)
            else:
                rows += 1
        return FileVerified(source, body.sha256, rows + len(rejects), tuple(rejects))

    limits = InFlight(workspace.recipe.storage.downloads, 1)
    yield from overlap(
        all_of(sources), partial(read_source, workspace.source), verify, lambda _, verified: verified, limits
    )


def _skipped(derived: Store, manifest: ShardManifest) -> FileDone | None:
    """The result of an earlier run; None: its statistics cannot be read after all."""
    try:
        statistics = read_statistics(derived, manifest)
    except UserError:
        return None
    return FileDone(manifest.source, manifest, statistics, skipped=True, seconds=0.0)
