"""All files of a run: downloaded, tokenized and stored side by side, each reported the moment it is done."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dflash_core.completions.reading import CompletionFile
from dflash_core.errors import UserError
from dflash_core.recipe import Recipe
from dflash_core.records import Reject, SourceFile
from dflash_core.storage.store import Stores, open_stores
from dflash_core.tokenization.files import FileDone, FileTokenizer, Names, find_done, read_source, store_file


@dataclass(frozen=True)
class FileFailed:
    """A file that could not be processed as a whole; the others go on."""

    source: SourceFile
    reason: str


@dataclass(frozen=True)
class FileVerified:
    """A file that was read whole, nothing written."""

    source: SourceFile
    sha256: str
    rows_read: int
    rejects: tuple[Reject, ...]


def process_files(recipe: Recipe, sources: Sequence[SourceFile]) -> Iterator[FileDone | FileFailed]:
    """Tokenize and store files; yields each as soon as it is done, in any order.

    Raises:
        RecipeError: the tokenizer or its chat template is unusable.
        StorageError: no client can be made.
    """
    tokenizer, stores = FileTokenizer(recipe), open_stores(recipe)
    for source in sources:
        yield _process(tokenizer, stores, source)


def _process(tokenizer: FileTokenizer, stores: Stores, source: SourceFile) -> FileDone | FileFailed:
    began = time.monotonic()
    names = Names(tokenizer.fingerprint, source.partition)
    try:
        found = find_done(stores, names, source)
        if found is not None:
            return found
        body = read_source(stores, source)
        done = tokenizer.tokenize(body.body, source, body.sha256)
        manifest = store_file(stores, names, source, body.sha256, done)
    except UserError as error:
        return FileFailed(source, str(error))
    return FileDone(source, manifest, done.statistics, skipped=False, seconds=time.monotonic() - began)


def verify_files(recipe: Recipe, sources: Sequence[SourceFile]) -> Iterator[FileVerified | FileFailed]:
    """Read every file whole and count its rows and rejects; writes nothing.

    Raises:
        StorageError: no client can be made.
    """
    stores = open_stores(recipe)
    for source in sources:
        try:
            body = read_source(stores, source)
            rows, rejects = 0, []
            for item in CompletionFile(body.body, source.uri):
                if isinstance(item, Reject):
                    rejects.append(item)
                else:
                    rows += len(item.turns) if recipe.tokenization.turns == "all" else 1
        except UserError as error:
            yield FileFailed(source, str(error))
        else:
            yield FileVerified(source, body.sha256, rows + len(rejects), tuple(rejects))
