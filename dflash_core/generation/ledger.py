"""The answers of one file of prompts that nothing can lose: a log of small objects in S3, each written once.

Segment n is created only if no segment n exists, so however many processes write, they agree on one order, and the
first committed answer to a request is the answer. The texts are in an unlinked local file meanwhile: memory holds a few
numbers a request, and a killed process leaves nothing behind. What a kill loses is what was not committed yet.
"""

import tempfile
import threading
from pathlib import Path
from typing import IO, NamedTuple

import orjson

from dflash_core.errors import ObjectCorrupt, ObjectMissing
from dflash_core.generation.answers import Answer, AnswerOutcome, outcome_of
from dflash_core.storage.s3 import Store

MAX_WAITING_TOKENS = 1 << 20
"""More than this is committed without waiting for the clock: about 4 MB."""


class AnswerPlace(NamedTuple):
    """Where an answer is in the local file, and what it is worth."""

    offset: int
    length: int
    outcome: AnswerOutcome


class Ledger:
    """Answers by request key. `commit` may run in a thread while `add` and `find` are called.

    Args:
        store: of everything derived.
        prefix: of the segments of this file and these parameters; ends with a slash.
        work_dir: for the local file.
    """

    def __init__(self, store: Store, prefix: str, work_dir: Path) -> None:
        work_dir.mkdir(parents=True, exist_ok=True)
        self._store, self._prefix = store, prefix
        self._file: IO[bytes] = tempfile.TemporaryFile(dir=work_dir)  # noqa: SIM115 - closed by close()
        self._places: dict[str, AnswerPlace] = {}
        self._waiting: dict[str, Answer] = {}
        self._waiting_tokens = 0
        self._changing, self._committing = threading.Lock(), threading.Lock()
        self._segments = 0
        self._read_new_segments()

    def __len__(self) -> int:
        return len(self._places)

    def find(self, key: str) -> AnswerPlace | None:
        """The committed answer to a request."""
        return self._places.get(key)

    def read(self, place: AnswerPlace) -> Answer:
        """The answer itself."""
        self._file.seek(place.offset)
        return Answer.model_validate_json(self._file.read(place.length))

    def add(self, key: str, answer: Answer) -> bool:
        """Take an answer up for the next commit; True when so much waits that it should come at once."""
        with self._changing:
            self._waiting[key] = answer
            self._waiting_tokens += answer.completion_tokens
            return self._waiting_tokens >= MAX_WAITING_TOKENS

    def commit(self) -> None:
        """Write what waits as one segment; afterwards it is found, unless another process answered first.

        Raises:
            StorageError: the store refuses or is unreachable; what waits goes on waiting.
        """
        with self._committing:
            with self._changing:
                waiting = dict(self._waiting)
            # Whoever creates segment n first owns it. The loser reads that segment, keeps only what it does not answer,
            # and tries the next number, so no answer is lost and none is replaced. A kill between `create` and the next
            # line costs nothing: whoever opens the ledger again reads the segment.
            while new := {key: answer for key, answer in waiting.items() if key not in self._places}:
                lines = {key: answer.model_dump_json(exclude_none=True).encode() for key, answer in new.items()}
                body = b"".join(b'{"key":"%s","answer":%s}\n' % (key.encode(), line) for key, line in lines.items())
                if self._store.create(self._segment(self._segments), body):
                    self._index(new)
                    self._segments += 1
                else:
                    self._read_new_segments()  # another process writes, too, and was first
            with self._changing:
                for key in waiting:
                    self._waiting_tokens -= self._waiting.pop(key).completion_tokens

    def close(self) -> None:
        """Give the local file back; what still waits is dropped."""
        with self._committing, self._changing:
            self._waiting.clear()
            self._waiting_tokens = 0
            self._file.close()

    def _read_new_segments(self) -> None:
        while True:
            key = self._segment(self._segments)
            try:
                body = self._store.get(key).body
            except ObjectMissing:
                return
            try:
                entries = [orjson.loads(line) for line in body.splitlines()]
                self._index({entry["key"]: Answer.model_validate(entry["answer"]) for entry in entries})
            except (ValueError, LookupError, TypeError) as error:
                raise ObjectCorrupt(
                    f"{self._store.uri(key)} is not a segment of a ledger ({error}); delete it"
                ) from None
            self._segments += 1

    def _index(self, answers: dict[str, Answer]) -> None:
        """Append to the local file; the first answer of a key stays."""
        offset = self._file.seek(0, 2)
        for key, answer in answers.items():
            if key in self._places:
                continue
            line = answer.model_dump_json(exclude_none=True).encode()
            self._file.write(line)
            self._places[key] = AnswerPlace(offset, len(line), outcome_of(answer))
            offset += len(line)

    def _segment(self, number: int) -> str:
        return f"{self._prefix}{number:06d}.jsonl"
