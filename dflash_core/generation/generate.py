"""The whole of generation: many files of prompts over all servers, so that they are busy to the last prompt.

One event loop; files are opened one ahead of the one whose prompts are being sent and finished as soon as their last
answer is committed. The loop runs only while the caller waits for the next file: `generate_files` is a plain generator,
and leaving it, by Ctrl-C too, commits what was answered. Memory does not grow with the number of prompts.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from pydantic import SecretStr

from dflash_core import GENERATION_VERSION
from dflash_core.errors import RecipeError, StorageError, UnreadableFile, UserError
from dflash_core.generation.answered_file import AnsweredFile, find_valid, open_answered_file
from dflash_core.generation.answers import Plan, Request, generation_of, outcome_of, plan_of
from dflash_core.generation.client import ServerConnection
from dflash_core.generation.progress import GenerationMeter, GenerationProgress
from dflash_core.generation.prompt_file import Prompt
from dflash_core.generation.server_check import PromptIds, check_server
from dflash_core.generation.servers import NoAnswer, Servers
from dflash_core.recipe import Recipe
from dflash_core.records import GeneratedFile, SourceFile
from dflash_core.storage.partitions import find_files
from dflash_core.workspace import Workspace

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
class GenerationWatch:
    """Who wants to see what happens meanwhile."""

    on_progress: Callable[[GenerationProgress], None] = lambda progress: None
    on_note: Callable[[str], None] = lambda sentence: None
    """What people should know, a sentence each: what could not be checked, trouble with storage."""


UNWATCHED = GenerationWatch()
FileOutcome = FileGenerated | FileNotGenerated


def generate_files(
    workspace: Workspace,
    sources: Sequence[SourceFile],
    prompt_ids: PromptIds,
    api_key: SecretStr | None = None,
    watch: GenerationWatch = UNWATCHED,
    *,
    anew: bool = False,
) -> Iterator[FileOutcome]:
    """Generate the completions of these files of prompts; each outcome as soon as the file is done.

    Args:
        workspace: its recipe has a [generation] section.
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
    plan = plan_of(workspace.recipe)
    with asyncio.Runner() as runner:
        work = _GenerationRun(workspace, plan, prompt_ids, api_key, watch, anew)
        main = runner.get_loop().create_task(work.run(sources))
        while (outcome := runner.run(work.next_outcome(main))) is not None:
            yield outcome


@dataclass
class _GenerationRun:
    workspace: Workspace
    plan: Plan
    prompt_ids: PromptIds
    api_key: SecretStr | None
    watch: GenerationWatch
    anew: bool
    _outcomes: asyncio.Queue[FileOutcome] = field(default_factory=asyncio.Queue)
    _open: list[AnsweredFile] = field(default_factory=list)
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
        self._meter = GenerationMeter(generation, sum(source.size for source in sources))
        self._servers = Servers(
            [ServerConnection(url, generation, self.api_key) for url in generation.servers], generation
        )
        self._permits = asyncio.Semaphore(generation.concurrency * len(generation.servers))
        try:
            async with asyncio.TaskGroup() as group:
                background = [group.create_task(self._commit_regularly()), group.create_task(self._show_progress())]
                await self._all_files(sources, group)
                for task in background:
                    task.cancel()
        finally:
            for work in self._open:
                try:
                    work.ledger.commit()
                except StorageError as error:
                    self.watch.on_note(f"answers to {work.source.uri} are lost: {error}")
            await self._servers.close()

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

    async def _open_file(self, source: SourceFile) -> AnsweredFile | None:
        """None: nothing is left to do, and the outcome is told."""
        try:
            if not self.anew and (manifest := await asyncio.to_thread(find_valid, self.workspace, source, self.plan)):
                if manifest.code_version != GENERATION_VERSION:
                    self.watch.on_note(
                        f"{manifest.completions_uri} was generated by version {manifest.code_version} of this "
                        "platform, whose settings cannot be compared; it is kept (--anew asks again)"
                    )
                self._meter.known_bytes += source.size
                self._outcomes.put_nowait(FileGenerated(manifest, skipped=True))
                return None
            folder = self.workspace.make_work_dir("generated_completions")
            work = await asyncio.to_thread(
                open_answered_file, source, self.plan, self.workspace, folder, anew=self.anew
            )
        except UserError as error:
            self._meter.known_bytes += source.size
            self._outcomes.put_nowait(FileNotGenerated(source, str(error)))
            return None
        self._open.append(work)
        return work

    async def _file(self, work: AnsweredFile, sent: asyncio.Event) -> None:
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

    async def _commit_patiently(self, work: AnsweredFile) -> None:
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

    async def _send(self, work: AnsweredFile, requests: asyncio.TaskGroup, sent: asyncio.Event) -> None:
        """Send all prompts of a file that are not settled, as permits become free."""
        for prompt, request in work.pending():
            await self._check_servers(prompt)
            await self._permits.acquire()
            task = requests.create_task(self._settle(work, prompt, request))
            task.add_done_callback(lambda _: self._permits.release())
        if not sent.is_set():
            self._meter.settled += work.known
            self._meter.known_bytes += work.known * work.bytes_a_line
        sent.set()

    async def _settle(self, work: AnsweredFile, prompt: Prompt, request: Request | None) -> None:
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
            notes = await check_server(connection, self.plan, self.prompt_ids, first, self.workspace.recipe.target.path)
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


def with_servers(workspace: Workspace, servers: Sequence[str]) -> Workspace:
    """The same with these base URLs instead of the recipe's own; none: as it is.

    Raises:
        RecipeError: the recipe has no [generation].
    """
    generation = generation_of(workspace.recipe)
    if not servers:
        return workspace
    section = generation.model_copy(update={"servers": tuple(servers)})
    return replace(workspace, recipe=workspace.recipe.model_copy(update={"generation": section}))


def api_key(recipe: Recipe, environment: Mapping[str, str]) -> SecretStr | None:
    """The servers' key, from the variable that the recipe names; None: they want none.

    Raises:
        RecipeError: the variable is not set.
    """
    variable = generation_of(recipe).api_key_variable
    if variable is None:
        return None
    if not environment.get(variable):
        raise RecipeError(f"generation.api_key_variable names {variable}, which is not set; set it to the servers' key")
    return SecretStr(environment[variable])


def list_prompts(workspace: Workspace) -> list[SourceFile]:
    """Every file of prompts, sorted by partition; none without a [generation] section.

    Raises:
        StorageError: the listing fails.
    """
    return [] if workspace.prompts is None else find_files(workspace.prompts)


def find_generated(workspace: Workspace, source: SourceFile) -> GeneratedFile | None:
    """The manifest of this file of prompts if its completions are complete and valid: generating would skip it."""
    return find_valid(workspace, source, plan_of(workspace.recipe))
