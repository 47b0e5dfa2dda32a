"""How one process works through files: downloads and uploads in threads, rows in the calling thread, memory bounded."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, TypeVar

from dflash_core.completions.read import check_size
from dflash_core.errors import UserError
from dflash_core.records import SourceFile
from dflash_core.storage.s3 import Download, Store

MAX_BYTES = 24 << 20
"""Of source files that one process holds at once, however many there are."""

Computed = TypeVar("Computed")
Result = TypeVar("Result")


@dataclass(frozen=True)
class FileFailed:
    """A file that could not be processed as a whole; the others go on."""

    source: SourceFile
    reason: str


@dataclass(frozen=True)
class InFlight:
    """Transfers of one process at once."""

    downloads: int
    uploads: int

    def share(self, processes: int) -> "InFlight":
        """What each of so many processes may have."""
        return InFlight(max(1, self.downloads // processes), max(1, self.uploads // processes))


Take = Callable[[bool], Sequence[SourceFile] | None]
"""Gives files that have come up since it was called last, maybe none; where there is nothing else to do (True) it waits
for one. None: no more will come."""


def all_of(sources: Sequence[SourceFile]) -> Take:
    """All files at once."""
    given = iter((sources,))
    return lambda idle: next(given, None)


def overlap(
    take: Take,
    read: Callable[[SourceFile], Download],
    compute: Callable[[SourceFile, Download], Computed],
    finish: Callable[[SourceFile, Computed], Result],
    limits: InFlight,
) -> Iterator[Result | FileFailed]:
    """Read each file in a thread, compute on it in this one, finish it in a thread; yields results as they come.

    So the network is busy while the processor is, and an unexpected error surfaces in the loop that drives everything.
    At most `MAX_BYTES` of source files are held, however many there are, but always one.

    Args:
        take: where the files come from.
        read: a file's bytes; may raise UserError.
        compute: from the bytes; may raise UserError.
        finish: what waits for the network once it is computed; may raise UserError.
        limits: transfers at once.
    """
    waiting: deque[SourceFile] = deque()
    reading: dict[Future[Download], SourceFile] = {}
    finishing: dict[Future[Result], SourceFile] = {}
    held, more = 0, True
    with ExitStack() as stack:
        readers, finishers = ThreadPoolExecutor(limits.downloads), ThreadPoolExecutor(limits.uploads)
        for pool in (readers, finishers):
            stack.callback(pool.shutdown, cancel_futures=True)
        while True:
            if more:
                new = take(not (waiting or reading or finishing))
                more = new is not None
                waiting.extend(new or ())
            while waiting and len(reading) < limits.downloads and (not held or held + waiting[0].size <= MAX_BYTES):
                source = waiting.popleft()
                held += source.size
                reading[readers.submit(read, source)] = source
            everything: list[Future[Any]] = [*finishing, *reading]
            if not everything:
                if more:
                    continue
                return
            done, _ = wait(everything, return_when=FIRST_COMPLETED)
            for finished in [future for future in finishing if future in done]:
                yield _outcome(finishing.pop(finished), finished)
            arrived = next((future for future in reading if future in done), None)
            if arrived is None:
                continue
            source = reading.pop(arrived)
            try:
                computed = compute(source, arrived.result())
            except UserError as error:
                yield FileFailed(source, str(error))
                continue
            finally:
                held -= source.size
            while len(finishing) >= limits.uploads:
                for finished in wait(finishing, return_when=FIRST_COMPLETED).done:
                    yield _outcome(finishing.pop(finished), finished)
            finishing[finishers.submit(finish, source, computed)] = source


def _outcome(source: SourceFile, finished: "Future[Any]") -> Any:
    try:
        return finished.result()
    except UserError as error:
        return FileFailed(source, str(error))


def read_source(store: Store, source: SourceFile) -> Download:
    """The file's bytes, exactly the version that was listed.

    Raises:
        UnreadableFile: it is larger than one file may be.
        ObjectChanged: it was replaced since.
        StorageError: it cannot be read.
    """
    check_size(source.uri, source.size)
    return store.get(source.key.removeprefix(store.prefix), etag=source.etag)
