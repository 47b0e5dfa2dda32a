"""All files of a run: downloaded, tokenized and stored side by side, each reported the moment it is done."""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any, TypeVar

from dflash_core.completions.reading import CompletionFile
from dflash_core.recipe import Recipe
from dflash_core.records import Reject, SourceFile
from dflash_core.storage.store import Download, Stores, open_stores
from dflash_core.tokenization.engine import Engine, FileFailed
from dflash_core.tokenization.files import FileTokenizer
from dflash_core.tokenization.fingerprint import fingerprint
from dflash_core.tokenization.objects import FileDone, Names, find_done, list_done
from dflash_core.tokenization.pool import WorkerPool
from dflash_core.tokenization.worker import TokenizingEngine

Result = TypeVar("Result")

__all__ = ["FileDone", "FileFailed", "FileVerified", "process_files", "verify_files"]


@dataclass(frozen=True)
class FileVerified:
    """A file that was read whole, nothing written."""

    source: SourceFile
    sha256: str
    rows_read: int
    rejects: tuple[Reject, ...]


def process_files(recipe: Recipe, sources: Sequence[SourceFile]) -> Iterator[FileDone | FileFailed]:
    """Tokenize and store files; yields each as soon as it is done, in any order. What is done already is skipped.

    Raises:
        RecipeError: the tokenizer or its chat template is unusable.
        StorageError: the store cannot be reached.
    """
    name = fingerprint(recipe)
    pending: list[SourceFile] = []
    for source, found in _found(recipe, name, sources):
        if found is None:
            pending.append(source)
        else:
            yield found
    order = {source.partition: i for i, source in enumerate(sources)}
    pending.sort(key=lambda source: order[source.partition])
    limits = recipe.storage.downloads, recipe.storage.uploads  # over all processes: none may be left without a share
    processes = min(recipe.tokenization.workers or len(os.sched_getaffinity(0)), len(pending), *limits)
    if processes > 1:
        with WorkerPool(recipe, processes) as pool:
            yield from pool.run(pending)
    elif pending:
        yield from drain(TokenizingEngine(FileTokenizer(recipe), recipe, 1), pending)


def _found(recipe: Recipe, name: str, sources: Sequence[SourceFile]) -> Iterator[tuple[SourceFile, FileDone | None]]:
    """Each file's result from an earlier run; in any order."""
    stores = open_stores(recipe)
    there = list_done(stores, name, [source.partition for source in sources])
    candidates = [source for source in sources if Names(name, source.partition).manifest in there]
    yield from ((source, None) for source in sources if Names(name, source.partition).manifest not in there)
    if candidates:
        with ThreadPoolExecutor(min(len(candidates), recipe.storage.downloads)) as pool:
            asked = {pool.submit(find_done, stores, Names(name, s.partition), s, there): s for s in candidates}
            for future in as_completed(asked):
                yield asked[future], future.result()


def drain(engine: Engine[Any, Result], sources: Sequence[SourceFile]) -> Iterator[Result | FileFailed]:
    """Everything through an engine of this process."""
    try:
        for source in sources:
            engine.add(source)
        while engine.outstanding:
            yield from engine.step()
    finally:
        engine.close()


def verify_files(recipe: Recipe, sources: Sequence[SourceFile]) -> Iterator[FileVerified | FileFailed]:
    """Read every file whole and count its rows and rejects; writes nothing.

    Raises:
        StorageError: no client can be made.
    """
    every = recipe.tokenization.turns == "all"

    def verify(source: SourceFile, body: Download) -> FileVerified:
        rows, rejects = 0, []
        for item in CompletionFile(body.body, source.uri):
            if isinstance(item, Reject):
                rejects.append(item)
            else:
                rows += len(item.turns) if every else 1
        return FileVerified(source, body.sha256, rows + len(rejects), tuple(rejects))

    stores: Stores = open_stores(recipe)
    engine: Engine[FileVerified, FileVerified] = Engine(
        stores, verify, lambda _, verified: verified, recipe.storage.downloads, 1
    )
    yield from drain(engine, sources)
