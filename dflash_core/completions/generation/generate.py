"""The whole of generation: many files of prompts over all servers, so that their slots are busy to the last prompt.

One event loop; files are opened one ahead of the one whose prompts are being sent and finished as soon as their last
answer is committed. The loop runs only while the caller waits for the next file: `generate_files` is a plain generator,
and leaving it, by Ctrl-C too, commits what was answered. Memory does not grow with the number of prompts.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from pydantic import SecretStr

from dflash_core.completions.generation.answers import Plan, Request, outcome_of
from dflash_core.completions.generation.inputs import plan_of
from dflash_core.completions.generation.probe import PromptIds, check_server
from dflash_core.completions.generation.progress import Meter, Progress
from dflash_core.completions.generation.prompts import Prompt
from dflash_core.completions.generation.servers import NoAnswer, Servers
from dflash_core.completions.generation.wire import Connection
from dflash_core.completions.generation.work import FileWork, find_valid, open_work
from dflash_core.errors import StorageError, UnreadableFile, UserError
from dflash_core.recipe import Recipe
from dflash_core.records import GeneratedFile, SourceFile
from dflash_core.storage.store import Stores, open_stores

PROGRESS_EVERY_S = 0.25


@dataclass(frozen=True)
class FileGenerated:
    """A file of completions that is where the recipe's source is."""

    manifest: GeneratedFile
    skipped: bool
    """It was complete and valid already."""


@dataclass(frozen=True)
class FileNotGenerated:
    """A file of prompts that did not become completions; its answers are kept."""

    source: SourceFile
    reason: str


@dataclass(frozen=True)
class Watch:
    """Who wants to see what happens meanwhile."""

    on_progress: Callable[[Progress], None] = lambda progress: None
    on_note: Callable[[str], None] = lambda sentence: None
    """What people should know, a sentence each: what could not be checked, trouble with storage."""


FileOutcome = FileGenerated | FileNotGenerated


def generate_files(
    recipe: Recipe,
    sources: Sequence[SourceFile],
    prompt_ids: PromptIds,
    api_key: SecretStr | None = None,
    watch: Watch = Watch(),
    *,
    anew: bool = False,
) -> Iterator[FileOutcome]:
    """Generate the completions of these files of prompts; each outcome as soon as the file is done.

    Args:
        recipe: with its [generation] section.
        sources: as `list_prompts` gives them.
        prompt_ids: a prompt's ids by the recipe's tokenizer, which the servers are compared with.
        api_key: for all servers.
        watch: gets progress and notes.
        anew: forget the answers of earlier runs first.

    Raises:
        RecipeError: no [generation], or an address that may not be talked to.
        ServerRefuses: a server does not fit the recipe; nothing was asked.
        ServersGone: no server answers any more; run the same again when one does.
    """
    plan = plan_of(recipe)
    with asyncio.Runner() as runner:
        work = _Generation(recipe, plan, open_stores(recipe), prompt_ids, api_key, watch, anew)
        main = runner.get_loop().create_task(work.run(sources))
        while (outcome := runner.run(work.next_outcome(main))) is not None:
            yield outcome


@dataclass
class _Generation:
    recipe: Recipe
    plan: Plan
    stores: Stores
    prompt_ids: PromptIds
    api_key: SecretStr | None
    watch: Watch
    anew: bool
    _outcomes: asyncio.Queue[FileOutcome] = field(default_factory=asyncio.Queue)
    _open: list[FileWork] = field(default_factory=list)
    _commit_now: asyncio.Event = field(default_factory=asyncio.Event)
    _checked: bool = False

    async def next_outcome(self, main: "asyncio.Task[None]") -> FileOutcome | None:
        """The next finished file; None after the last; raises what ended `main`."""
        waiting = asyncio.ensure_future(self._outcomes.get())
        await asyncio.wait({waiting, main}, return_when=asyncio.FIRST_COMPLETED)
        if waiting.done():
            return waiting.result()
        waiting.cancel()
        if not self._outcomes.empty():
            return self._outcomes.get_nowait()
        try:
            main.result()
        except* UserError as group:
            raise _first(group) from None
        return None

    async def run(self, sources: Sequence[SourceFile]) -> None:
        """Generate all files; their outcomes go into the queue."""
        generation = self.plan.generation
        self._meter = Meter(generation, sum(source.size for source in sources))
        self._servers = Servers([Connection(url, generation, self.api_key) for url in generation.servers], generation)
        self._slots = asyncio.Semaphore(generation.concurrency * len(generation.servers))
        try:
            async with asyncio.TaskGroup() as group:
                background = [group.create_task(self._commit_regularly()), group.create_task(self._show_progress())]
                await self._all_files(sources, group)
                for task in background:
                    task.cancel()
        finally:
            for work in self._open:
                self._commit_last(work)
            await self._servers.close()

    def _commit_last(self, work: FileWork) -> None:
        """What was answered when everything stopped."""
        try:
            work.ledger.commit()
        except StorageError as error:
            self.watch.on_note(f"answers to {work.source.uri} are lost: {error}")

    async def _all_files(self, sources: Sequence[SourceFile], group: asyncio.TaskGroup) -> None:
        """Send every file's prompts, one file after the other, each opened while its predecessor's are being sent."""
        files: list[asyncio.Task[None]] = []
        opening = group.create_task(self._open_file(sources[0])) if sources else None
        for position in range(1, len(sources) + 1):
            assert opening is not None
            work = await opening
            opening = group.create_task(self._open_file(sources[position])) if position < len(sources) else None
            if work is not None:
                sent = asyncio.Event()
                files.append(group.create_task(self._file(work, sent)))
                await sent.wait()
        if files:
            await asyncio.wait(files)

    async def _open_file(self, source: SourceFile) -> FileWork | None:
        """None: nothing is left to do, and the outcome is told."""
        try:
            if not self.anew and (manifest := await asyncio.to_thread(find_valid, self.stores, source, self.plan)):
                self._meter.known_bytes += source.size
                self._outcomes.put_nowait(FileGenerated(manifest, skipped=True))
                return None
            folder = self.recipe.storage.work_dir / "generated_completions"
            work = await asyncio.to_thread(open_work, source, self.plan, self.stores, folder, anew=self.anew)
        except UserError as error:
            self._meter.known_bytes += source.size
            self._outcomes.put_nowait(FileNotGenerated(source, str(error)))
            return None
        self._open.append(work)
        return work

    async def _file(self, work: FileWork, sent: asyncio.Event) -> None:
        """One file from its first request to its manifest; `sent` is set when the next file may send."""
        reason, complete = "", False
        try:
            while not reason and not complete:
                try:
                    async with asyncio.TaskGroup() as requests:
                        await self._send(work, requests, sent)
                except* UnreadableFile as group:
                    reason = str(_first(group))
                await self._commit_patiently(work)
                # Another process may have been first, with an answer so bad that the plan asks on.
                complete = not reason and await asyncio.to_thread(work.is_answered)
            if not reason:
                manifest = await asyncio.to_thread(work.finish)
                self._outcomes.put_nowait(FileGenerated(manifest, skipped=False))
        except (StorageError, UnreadableFile) as error:
            reason = str(error)
        finally:
            sent.set()
        if reason:
            self._outcomes.put_nowait(FileNotGenerated(work.source, reason))
        self._open.remove(work)
        await asyncio.to_thread(work.ledger.close)

    async def _commit_patiently(self, work: FileWork) -> None:
        """Commit the last answers of a file, trying again while storage fails, for as long as the recipe's patience."""
        generation, began = self.plan.generation, time.monotonic()
        while True:
            try:
                return await asyncio.to_thread(work.ledger.commit)
            except StorageError as error:
                if time.monotonic() - began > generation.patience_s:
                    self.watch.on_note(f"answers to {work.source.uri} are lost: {error}")
                    raise
            await asyncio.sleep(generation.commit_every_s)

    async def _send(self, work: FileWork, requests: asyncio.TaskGroup, sent: asyncio.Event) -> None:
        """Send all prompts of a file that are not settled, as slots become free."""
        for prompt, request in work.pending():
            await self._check_servers(prompt)
            await self._slots.acquire()
            task = requests.create_task(self._settle(work, prompt, request))
            task.add_done_callback(lambda _: self._slots.release())
        if not sent.is_set():
            self._meter.settled += work.known
            self._meter.known_bytes += work.known * work.bytes_a_line
        sent.set()

    async def _settle(self, work: FileWork, prompt: Prompt, request: Request | None) -> None:
        """Ask until the plan has nothing more to ask."""
        outcome = "unanswered"
        while request is not None:
            answer = await self._servers.ask(prompt, request, self.plan)
            if isinstance(answer, NoAnswer):
                work.no_answers[prompt.line] = answer
                outcome = answer.outcome
                break
            work.asked += 1
            self._meter.answered(answer)
            if work.ledger.add(request.key, answer):
                self._commit_now.set()
            verdict = outcome_of(answer)
            outcome, request = verdict, self.plan.next(prompt, request, verdict)
        self._meter.asked_bytes += work.bytes_a_line
        self._meter.settled += 1
        self._meter.outcomes[outcome] += 1
        work.settle(outcome)

    async def _check_servers(self, first: Prompt) -> None:
        """Once, before the first request of all."""
        if self._checked:
            return
        for connection in self._servers.connections:
            notes = await check_server(connection, self.plan, self.prompt_ids, first, self.recipe.target.path)
            for note in notes:
                self.watch.on_note(note)
        self._checked = True

    async def _commit_regularly(self) -> None:
        """Put what was answered into the ledgers; storage that fails for long stops everything."""
        committed_at = time.monotonic()
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._commit_now.wait(), self.plan.generation.commit_every_s)
            self._commit_now.clear()
            try:
                for work in list(self._open):
                    await asyncio.to_thread(work.ledger.commit)
                committed_at = time.monotonic()
            except StorageError as error:
                self.watch.on_note(f"answers wait in memory: {error}")
                if time.monotonic() - committed_at > self.plan.generation.patience_s:
                    raise

    async def _show_progress(self) -> None:
        while True:
            self.watch.on_progress(self._meter.read(self._servers.in_flight, self._servers.allowed))
            await asyncio.sleep(PROGRESS_EVERY_S)


def _first(group: BaseExceptionGroup[UserError]) -> UserError:
    """Of exceptions within groups within groups, the first."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, UserError)
    return error
