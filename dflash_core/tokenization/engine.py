"""One process's share of the work: downloads and uploads in threads, rows in the calling thread, memory bounded.

`step` waits until something has arrived, works on it and returns what is finished, so that one loop drives everything
and an unexpected error surfaces where it can be seen. At most `MAX_BYTES` of source files are held at once, however
many files there are.
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from dflash_core.errors import UserError
from dflash_core.records import SourceFile
from dflash_core.storage.store import Download, Stores
from dflash_core.tokenization.objects import read_source

MAX_BYTES = 24 << 20

Computed = TypeVar("Computed")
Result = TypeVar("Result")


@dataclass(frozen=True)
class FileFailed:
    """A file that could not be processed as a whole; the others go on."""

    source: SourceFile
    reason: str


class Engine(Generic[Computed, Result]):
    """Downloads sources, computes on each in the calling thread and finishes it in another.

    Args:
        stores: of this process.
        compute: from the file's bytes; may raise UserError.
        finish: what waits for the network once it is computed; may raise UserError.
        downloads: in flight at once.
        uploads: in flight at once.
    """

    def __init__(
        self,
        stores: Stores,
        compute: Callable[[SourceFile, Download], Computed],
        finish: Callable[[SourceFile, Computed], Result],
        downloads: int,
        uploads: int,
    ) -> None:
        self._stores, self._compute, self._finish = stores, compute, finish
        self._limits = downloads, uploads
        self._pools = ThreadPoolExecutor(downloads), ThreadPoolExecutor(uploads)
        self._waiting: deque[SourceFile] = deque()
        self._downloads: dict[Future[Download], SourceFile] = {}
        self._uploads: dict[Future[Result], SourceFile] = {}
        self._bytes = 0

    @property
    def outstanding(self) -> int:
        """Files added and not yet returned."""
        return len(self._waiting) + len(self._downloads) + len(self._uploads)

    def add(self, source: SourceFile) -> None:
        """Take on one more file."""
        self._waiting.append(source)
        self._start_downloads()

    def step(self) -> list[Result | FileFailed]:
        """Wait for the next event and handle it; returns files that are finished by it, often none."""
        finished: list[Result | FileFailed] = []
        everything: list[Future[Any]] = [*self._uploads, *self._downloads]
        done, _ = wait(everything, return_when=FIRST_COMPLETED)
        for upload in [future for future in self._uploads if future in done]:
            finished.append(self._outcome(upload))
        arrived = next((future for future in self._downloads if future in done), None)
        if arrived is not None:
            finished += self._handle(self._downloads.pop(arrived), arrived)
        return finished

    def close(self) -> None:
        """Wait for threads that still run."""
        for pool in self._pools:
            pool.shutdown(cancel_futures=True)

    def _handle(self, source: SourceFile, arrived: "Future[Download]") -> list[Result | FileFailed]:
        finished: list[Result | FileFailed] = []
        self._start_downloads()
        try:
            body = arrived.result()
            computed = self._compute(source, body)
        except UserError as error:
            return [FileFailed(source, str(error))]
        finally:
            self._bytes -= source.size
            self._start_downloads()
        while len(self._uploads) >= self._limits[1]:
            for upload in wait(self._uploads, return_when=FIRST_COMPLETED).done:
                finished.append(self._outcome(upload))
        self._uploads[self._pools[1].submit(self._finish, source, computed)] = source
        return finished

    def _start_downloads(self) -> None:
        while self._waiting and len(self._downloads) < self._limits[0]:
            size = self._waiting[0].size
            if self._bytes and self._bytes + size > MAX_BYTES:
                return
            source = self._waiting.popleft()
            self._bytes += size
            self._downloads[self._pools[0].submit(read_source, self._stores, source)] = source

    def _outcome(self, upload: "Future[Result]") -> Result | FileFailed:
        source = self._uploads.pop(upload)
        try:
            return upload.result()
        except UserError as error:
            return FileFailed(source, str(error))
