"""One file of prompts on its way to a file of completions: what is still to be asked, and the file once all is settled.

Every line of the prompts ends up in the completions or among the rejects with its reason. The completions are written
in the order of the prompts, whole, to where the recipe's source is; the manifest follows last.
"""

import gzip
import hashlib
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import orjson
import zstandard

from dflash_core import GENERATION_VERSION
from dflash_core.completions.read import check_size, read_lines
from dflash_core.errors import UnreadableFile
from dflash_core.generation.answers import Answer, AnswerOutcome, Plan, Request, output_row
from dflash_core.generation.ledger import Ledger
from dflash_core.generation.prompt_file import Prompt, PromptFile, api_messages
from dflash_core.generation.servers import NoAnswer
from dflash_core.records import GeneratedFile, Reject, SourceFile, StoredObject
from dflash_core.storage.layout import GeneratedKeys
from dflash_core.storage.partitions import object_key
from dflash_core.storage.s3 import Download
from dflash_core.workspace import Workspace

ORIGIN = "generated-from"
"""Metadata of a file of completions, written with it in one step: a hash of where its prompts are."""
SHOWN_REASONS = 4


def find_valid(workspace: Workspace, source: SourceFile, plan: Plan) -> GeneratedFile | None:
    """The manifest of a file that asking again would not change.

    One that another version wrote is valid if its model is the same: its hashes cannot be compared, and answers cost
    money.
    """
    manifest = workspace.derived.find_record(GeneratedKeys(source.partition).manifest, GeneratedFile)
    if manifest is None:
        return None
    if manifest.code_version == GENERATION_VERSION:
        same = (manifest.request_hash, manifest.policy_hash) == (plan.request_hash, plan.policy_hash)
    else:
        same = manifest.model == plan.generation.model
    complete = not (manifest.outcomes.get("refused") or manifest.outcomes.get("unanswered"))
    unchanged = manifest.prompts.etag == source.etag and workspace.source.holds(manifest.completions)
    return manifest if same and complete and unchanged else None


@dataclass
class AnsweredFile:
    """One file of prompts, its ledger, and what this run found out about it."""

    source: SourceFile
    plan: Plan
    workspace: Workspace
    work_dir: Path
    prompts: PromptFile
    sha256: str
    lines: int
    ledger: Ledger
    no_answers: dict[int, NoAnswer] = field(default_factory=dict)
    """By line."""
    known: int = 0
    """Lines that need no request: rejected ones, and prompts that earlier runs settled."""
    settled: int = 0
    bad: Counter[str] = field(default_factory=Counter)
    """Outcome -> settled prompts with a bad one."""
    asked: int = 0
    began: float = field(default_factory=time.monotonic)

    def pending(self) -> Iterator[tuple[Prompt, Request]]:
        """Every prompt that is not settled yet, with what is to be asked next; all others are counted again."""
        self.known = self.settled = 0
        self.bad.clear()
        for prompt in self.prompts:
            if isinstance(prompt, Reject):
                self.known += 1
                continue
            request, outcome = self._chain(prompt)
            missing = self.no_answers.get(prompt.line)
            if missing is not None:
                self.settle(missing.outcome)
            elif outcome is None:
                yield prompt, request
            else:
                self.known += 1
                self.settle(outcome)

    @property
    def bytes_a_line(self) -> float:
        """What one line of the prompts weighs in progress."""
        return self.source.size / self.lines

    def is_answered(self) -> bool:
        """Whether the ledger holds all that is needed, prompts left aside that got no answer in this run."""
        return all(
            isinstance(prompt, Reject) or prompt.line in self.no_answers or self._chain(prompt)[1] is not None
            for prompt in self.prompts
        )

    def settle(self, outcome: str) -> None:
        """A prompt has its last answer, or none for good.

        Raises:
            UnreadableFile: so many are bad that going on is a waste.
        """
        self.settled += 1
        if outcome != "good":
            self.bad[outcome] += 1
        if self.settled >= self.plan.generation.outcomes.enough_answers:
            self._check_hope()

    def finish(self) -> GeneratedFile:
        """Write completions, rejects and manifest. Everything must have been settled and committed.

        Raises:
            UnreadableFile: too many answers are bad, or none can be kept; a foreign file is in the place; or the file
                would be too large for `tokenize`.
            StorageError: the store refuses or is unreachable.
        """
        self._check_hope()
        self.check_place()
        relative = object_key(self.source.partition, "")
        with tempfile.TemporaryDirectory(dir=self.work_dir) as folder:
            path = Path(folder) / "completions"
            with _output(path, relative) as file:
                tally = _OutputTally()
                for prompt in self.prompts:
                    file.write(self._line(prompt, tally))
            if not tally.written:
                raise UnreadableFile(f"no answer can be kept: {_counted(tally.reasons)}")
            check_size(f"what {self.source.uri} became", path.stat().st_size)
            rejects = b"".join(reject.model_dump_json().encode() + b"\n" for reject in tally.rejects)
            stored_rejects = self.workspace.derived.put(
                GeneratedKeys(self.source.partition).rejects, rejects, "application/jsonl"
            )
            # The order is the promise. The file is whole and carries its origin in the same request, so a run that
            # ends here finds its own file again (`check_place`) and replaces it; only the manifest, written last,
            # makes it done (`find_valid`), and that names the bytes by size and sha256.
            completions = self.workspace.source.upload(relative, path, {ORIGIN: self._origin})
        manifest = self._manifest(tally, completions, stored_rejects)
        self.workspace.derived.put_record(GeneratedKeys(self.source.partition).manifest, manifest)
        return manifest

    def check_place(self) -> None:
        """Refuse to replace a source file of somebody else's.

        Raises:
            UnreadableFile: there is one.
        """
        if self.plan.generation.overwrite:
            return
        key = object_key(self.source.partition, "")
        metadata = self.workspace.source.find_metadata(key)
        if metadata is None or metadata.get(ORIGIN) == self._origin:
            return  # a run may have ended between the file and its manifest
        manifest = self.workspace.derived.find_record(GeneratedKeys(self.source.partition).manifest, GeneratedFile)
        if manifest is None or not self.workspace.source.holds(manifest.completions):
            raise UnreadableFile(
                f"{self.workspace.source.uri(key)} is there and was not generated from these prompts; move it away, or "
                "set generation.overwrite = true"
            )

    @property
    def _origin(self) -> str:
        return hashlib.sha256(self.source.uri.encode()).hexdigest()

    def _chain(self, prompt: Prompt) -> tuple[Request, AnswerOutcome | None]:
        """The last request of a prompt as far as the ledger knows, and its outcome if it is answered."""
        request = self.plan.first(prompt)
        while (place := self.ledger.find(request.key)) is not None:
            following = self.plan.next(prompt, request, place.outcome)
            if following is None:
                return request, place.outcome
            request = following
        return request, None

    def _line(self, prompt: Prompt | Reject, tally: "_OutputTally") -> bytes:
        """The output for one line of the prompts: a row, or nothing and a reject."""
        tally.lines += 1
        if isinstance(prompt, Reject):
            return tally.reject(prompt)
        missing = self.no_answers.get(prompt.line)
        if missing is not None:
            tally.outcomes[missing.outcome] += 1
            return tally.reject(Reject(line=prompt.line, reason=missing.outcome, detail=missing.reason))
        request, _ = self._chain(prompt)
        place = self.ledger.find(request.key)
        assert place is not None, "a prompt was never settled"
        answer, outcome = self.ledger.read(place), place.outcome
        cut = outcome == "truncated" and answer.cut_in_thought
        tally.cut_in_thought += cut
        if tally.is_repeated(prompt, answer):
            tally.outcomes["duplicate"] += 1
            if self.plan.generation.outcomes.duplicate == "drop":
                return tally.reject(Reject(line=prompt.line, reason="duplicate", detail="prompt and answer occurred"))
        else:
            tally.outcomes[outcome] += 1
        if self.plan.policy(outcome) != "keep":
            detail = f"{answer.completion_tokens} tokens" + (", cut inside the thought" if cut else "")
            return tally.reject(Reject(line=prompt.line, reason=outcome, detail=detail))
        tally.keep(answer)
        return output_row(prompt, answer, request, self.plan, self.source.key)

    def _check_hope(self) -> None:
        bad, most = sum(self.bad.values()), self.plan.generation.outcomes.max_bad_share
        if bad > most * self.settled:
            raise UnreadableFile(
                f"given up: of {self.settled} answers {100 * bad / self.settled:.0f} % are bad ({_counted(self.bad)}), "
                f"more than generation.outcomes.max_bad_share = {most:g}; correct the server, its template or the "
                "sampling, then generate it again"
            )

    def _manifest(self, tally: "_OutputTally", completions: StoredObject, rejects: StoredObject) -> GeneratedFile:
        return GeneratedFile(
            code_version=GENERATION_VERSION,
            partition=self.source.partition,
            request_hash=self.plan.request_hash,
            policy_hash=self.plan.policy_hash,
            prompts=self.source,
            prompts_sha256=self.sha256,
            model=self.plan.generation.model,
            servers=tuple(sorted(tally.servers)),
            completions=completions,
            completions_uri=self.workspace.source.uri(completions.key),
            rejects=rejects,
            lines=tally.lines,
            written=tally.written,
            dropped=dict(tally.reasons.most_common()),
            outcomes=dict(tally.outcomes.most_common()),
            cut_in_thought=tally.cut_in_thought,
            asked=self.asked,
            prompt_tokens=tally.prompt_tokens,
            completion_tokens=tally.completion_tokens,
            completion_histogram=dict(sorted(tally.lengths.items())),
            answer_seconds=dict(sorted(tally.seconds.items())),
            seconds=round(time.monotonic() - self.began, 3),
        )


def open_answered_file(
    source: SourceFile, plan: Plan, workspace: Workspace, work_dir: Path, *, anew: bool
) -> AnsweredFile:
    """Read the prompts and the ledger; `anew` throws the ledger away first.

    Raises:
        UserError: the prompts cannot be read, or a foreign file is where the completions belong.
    """
    assert workspace.prompts is not None
    prefix = GeneratedKeys(source.partition).ledger(plan.request_hash)
    if anew:
        for key in sorted((key for key, _, _ in workspace.derived.list(prefix)), reverse=True):  # a kill leaves no gap
            workspace.derived.delete(key)
    check_size(source.uri, source.size)
    got: Download = workspace.prompts.get(source.key.removeprefix(workspace.prompts.prefix), etag=source.etag)
    prompts = PromptFile(got.body, source.uri, plan.generation.answers_in_prompts)
    lines = sum(1 for _ in read_lines(got.body, source.uri))
    if not lines:
        raise UnreadableFile(f"{source.uri} is empty; put prompts into it or remove it")
    work = AnsweredFile(
        source, plan, workspace, work_dir, prompts, got.sha256, lines, Ledger(workspace.derived, prefix, work_dir)
    )
    if not work.is_answered():
        work.check_place()
    return work


@dataclass
class _OutputTally:
    """Counts while the output is written."""

    lines: int = 0
    written: int = 0
    cut_in_thought: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    rejects: list[Reject] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    lengths: Counter[int] = field(default_factory=Counter)
    seconds: Counter[int] = field(default_factory=Counter)
    servers: set[str] = field(default_factory=set)
    _seen: set[bytes] = field(default_factory=set)

    def reject(self, reject: Reject) -> bytes:
        self.rejects.append(reject)
        self.reasons[reject.reason] += 1
        return b""

    def keep(self, answer: Answer) -> None:
        self.written += 1
        self.prompt_tokens += answer.prompt_tokens
        self.completion_tokens += answer.completion_tokens
        self.lengths[answer.completion_tokens] += 1
        self.seconds[int(answer.seconds) + 1] += 1
        self.servers.add(answer.server)

    def is_repeated(self, prompt: Prompt, answer: Answer) -> bool:
        said = [answer.reasoning, answer.content, answer.tool_calls]
        digest = hashlib.sha256(orjson.dumps([api_messages(prompt.messages), prompt.tools, said])).digest()
        repeated = digest in self._seen
        self._seen.add(digest)
        return repeated


@contextmanager
def _output(path: Path, name: str) -> Iterator[IO[bytes]]:
    """A file to write lines to, compressed as its name says; equal lines give equal bytes."""
    with path.open("wb") as plain:
        if name.endswith(".gz"):
            with gzip.GzipFile("", "wb", fileobj=plain, mtime=0) as packed:
                yield packed  # type: ignore[misc]
        elif name.endswith(".zst"):
            with zstandard.ZstdCompressor().stream_writer(plain, closefd=False) as writer:
                yield writer
        else:
            yield plain


def _counted(reasons: Counter[str]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in reasons.most_common(SHOWN_REASONS)) or "nothing was asked"
