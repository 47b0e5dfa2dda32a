"""Tokenizing in this process or in several: who holds which file, and what becomes of it when a worker dies.

A nursery loads the tokenizer once (seconds of CPU and 300 MB) and forks a worker a core. Each worker has a client of
its own, so neither a lock nor a single process is in the way of many cores. The file a worker was at when it died, or
on which it made no progress for `STALL_S`, fails with a sentence; files that waited there, or for their upload, go to
another worker as long as there is one.
"""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from dflash_core.errors import ProcessDied, RecipeError
from dflash_core.processes import Child, Died, News, Nursery, Parent, Refused, Told, listen
from dflash_core.records import ShardManifest, SourceFile
from dflash_core.shards.overlap import FileFailed, InFlight, Take, all_of, overlap, read_source
from dflash_core.shards.tokenize_file import FileTokenizer, TokenizedFile, store_file
from dflash_core.statistics.statistics import FileStatistics
from dflash_core.storage.layout import ShardKeys
from dflash_core.storage.s3 import Download
from dflash_core.tokenization.tokenizer import fingerprint
from dflash_core.workspace import Workspace

STALL_S = 300.0
SPARE_WORKERS = 8
"""Workers that may die before the rest of the files is given up."""
QUEUED_AHEAD = 2
"""Files a worker holds beyond those it can download at once."""
PROGRESS_S = 5.0


@dataclass(frozen=True)
class FileDone:
    """One source file that is tokenized and stored."""

    source: SourceFile
    manifest: ShardManifest
    statistics: FileStatistics
    skipped: bool
    """Its shard was valid already."""
    seconds: float


@dataclass(frozen=True)
class Ready:
    """The worker has loaded its tokenizer."""


@dataclass(frozen=True)
class AtWork:
    """The worker is at the rows of this file, and not stuck there; None: at none."""

    partition: str | None


def tokenize_here(
    workspace: Workspace, tokenizer: FileTokenizer, sources: Sequence[SourceFile], limits: InFlight
) -> Iterator[FileDone | FileFailed]:
    """Tokenize in this process, with a tokenizer of the workspace's recipe; see `tokenize_files`."""
    yield from _tokenize(workspace, tokenizer, all_of(sources), limits)


def tokenize_in_workers(
    workspace: Workspace, sources: Sequence[SourceFile], processes: int, limits: InFlight
) -> Iterator[FileDone | FileFailed]:
    """Tokenize in so many processes; each file's outcome as soon as it is known.

    Raises:
        UserError: the tokenizer cannot be used.
        ProcessDied: the process that loads it died, or did not load it in `STALL_S`.
    """
    # The files are here (`waiting`) until a worker gets them, a few ahead so that it downloads while it computes. A
    # worker tells of each file once, when its shard is stored; until then the file is in `held`. So when a worker
    # ends, `held` is exactly what has to be done again, and only the file it was *at* can have been the cause: that one
    # fails, the others wait for another worker. Storing twice does no harm: the bytes are the same.
    nursery = Nursery(FileTokenizer, workspace.recipe, name="loading the tokenizer", keep_for=processes)
    pool = _Pool(workspace, limits, deque(sources), nursery)
    try:
        for _ in range(processes):
            pool.hire()
        while pool.waiting or any(worker.held for worker in pool.workers):
            pool.give()
            if not pool.workers:
                yield from pool.give_up()
                return
            yield from pool.listen()
    finally:
        nursery.end()


@dataclass(eq=False)
class _Worker:
    """One worker process and the files it holds."""

    child: Child
    held: dict[str, SourceFile] = field(default_factory=dict)
    at: str | None = None
    """The partition whose rows it is at."""
    ready: bool = False
    heard: float = field(default_factory=time.monotonic)


@dataclass
class _Pool:
    workspace: Workspace
    limits: InFlight
    waiting: deque[SourceFile]
    nursery: Nursery
    workers: list[_Worker] = field(default_factory=list)
    may_follow: int = SPARE_WORKERS
    ever_ready: bool = False
    began: float = field(default_factory=time.monotonic)
    last_end: str = ""
    """What became of the worker that ended last."""

    def __post_init__(self) -> None:
        self._fingerprint = fingerprint(self.workspace.recipe)

    def hire(self) -> None:
        """One more worker process."""
        child = self.nursery.fork(work, self.workspace, self.limits, self._fingerprint, name="tokenizing")
        self.workers.append(_Worker(child))

    def give(self) -> None:
        """Hand files to whoever holds fewest, so that each has some to download while it computes."""
        while self.waiting and self.workers:
            worker = min(self.workers, key=lambda w: len(w.held))
            if len(worker.held) >= self.limits.downloads + QUEUED_AHEAD:
                return
            source = self.waiting.popleft()
            worker.held[source.partition] = source
            worker.child.tell(source)

    def listen(self) -> Iterator[FileDone | FileFailed]:
        """What the workers have to say, and what is to be said of those that say nothing."""
        by_child = {worker.child: worker for worker in self.workers}
        for child, news in listen([self.nursery.child, *by_child], timeout_s=1.0):
            if child is self.nursery.child:
                self._heed_nursery(news)
            else:
                yield from self._heed(by_child[child], news)
        if not self.ever_ready and time.monotonic() - self.began > STALL_S:
            raise ProcessDied(f"the tokenizer was not loaded within {STALL_S:.0f} s; look at its chat template")
        for worker in list(self.workers):
            busy = worker.at is not None or (self.ever_ready and not worker.ready)
            if busy and time.monotonic() - worker.heard > STALL_S:
                yield from self._bury(worker, f"made no progress for {STALL_S:.0f} s")

    def give_up(self) -> Iterator[FileFailed]:
        """Every file that nobody is left to tokenize."""
        why = f"no worker process is left to tokenize it, the last one {self.last_end}; run it again"
        for source in self.waiting:
            yield FileFailed(source, f"{source.uri}: {why}")

    def _heed_nursery(self, news: News) -> None:
        """It says nothing as long as it lives. Without it the workers go on, but nobody follows them."""
        self.may_follow = 0
        if isinstance(news, Refused):
            raise news.error
        if isinstance(news, Died) and not self.ever_ready:
            raise ProcessDied(f"the process that loads the tokenizer {news.reason}")

    def _heed(self, worker: _Worker, news: News) -> Iterator[FileDone | FileFailed]:
        worker.heard = time.monotonic()
        if isinstance(news, Refused):
            self.may_follow = 0  # whoever followed would be refused, too
            yield from self._bury(worker, f"could not begin ({news.error})")
        elif isinstance(news, Died):
            yield from self._bury(worker, news.reason)
        elif isinstance(news, Told):
            told = news.value
            if isinstance(told, AtWork):
                worker.at = told.partition
            elif isinstance(told, Ready):
                worker.ready = self.ever_ready = True
            else:
                worker.held.pop(told.source.partition)
                yield told

    def _bury(self, worker: _Worker, reason: str) -> Iterator[FileFailed]:
        worker.child.end()
        self.workers.remove(worker)
        self.last_end = reason
        if self.may_follow:
            self.may_follow -= 1
            self.hire()
        for partition, source in worker.held.items():
            if partition == worker.at:
                yield FileFailed(source, f"{source.uri}: its worker process {reason}; run it again")
            else:
                self.waiting.appendleft(source)


def work(parent: Parent, tokenizer: FileTokenizer, workspace: Workspace, limits: InFlight, expected: str) -> None:
    """A worker's function: tokenizes the files it is told, until nobody is left to tell it any.

    Raises:
        RecipeError: the tokenizer is not the one that the run began with.
    """
    if tokenizer.fingerprint != expected:
        raise RecipeError(f"the tokenizer in {workspace.recipe.tokenizer_path} was changed while it was in use")
    parent.tell(Ready())

    def take(idle: bool) -> list[SourceFile]:
        """What waits to be taken; one at least if there is nothing else to do."""
        taken: list[SourceFile] = []
        while parent.heard(None if idle and not taken else 0.0):
            taken.append(parent.take())
        return taken

    for outcome in _tokenize(workspace, tokenizer, take, limits, parent):
        parent.tell(outcome)


def _tokenize(
    workspace: Workspace, tokenizer: FileTokenizer, take: Take, limits: InFlight, parent: Parent | None = None
) -> Iterator[FileDone | FileFailed]:
    """Files through one process; a worker tells its parent what it is at."""

    def compute(source: SourceFile, body: Download) -> tuple[TokenizedFile, str, float]:
        began = time.monotonic()
        if parent is None:
            return tokenizer.tokenize(body.body, source, body.sha256), body.sha256, began
        tokenizer.on_progress = _Sign(parent, AtWork(source.partition))
        parent.tell(AtWork(source.partition))
        try:
            return tokenizer.tokenize(body.body, source, body.sha256), body.sha256, began
        finally:
            parent.tell(AtWork(None))

    def finish(source: SourceFile, made: tuple[TokenizedFile, str, float]) -> FileDone:
        tokenized, sha256, began = made
        keys = ShardKeys(tokenizer.fingerprint, source.partition)
        manifest = store_file(workspace.derived, keys, source, sha256, tokenized)
        return FileDone(source, manifest, tokenized.statistics, skipped=False, seconds=time.monotonic() - began)

    yield from overlap(take, partial(read_source, workspace.source), compute, finish, limits)


@dataclass
class _Sign:
    """Tells the parent that work goes on, at most once in `PROGRESS_S`."""

    parent: Parent
    sign: AtWork
    last: float = field(default_factory=time.monotonic)

    def __call__(self) -> None:
        if time.monotonic() - self.last > PROGRESS_S:
            self.last = time.monotonic()
            self.parent.tell(self.sign)
