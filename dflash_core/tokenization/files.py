"""One source file's bytes -> its shard, statistics and rejects.

Everything about a row is decided here in one process and one pass, so equal bytes give equal results and running a file
twice is harmless.
"""

import json
import logging
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from dflash_core import TOKENIZATION_VERSION
from dflash_core.completions.reading import CompletionFile
from dflash_core.completions.record import Completion, Refused
from dflash_core.quality.flags import Flag
from dflash_core.quality.hashes import hash_rows
from dflash_core.quality.statistics import FileStatistics, RenderedRows, file_statistics
from dflash_core.recipe import Recipe
from dflash_core.records import Reject, SourceFile
from dflash_core.tokenization.backends import HuggingFace, choose_backend
from dflash_core.tokenization.batch_encoder import BatchEncoder, Item
from dflash_core.tokenization.fingerprint import fingerprint_of
from dflash_core.tokenization.objects import TokenizedFile
from dflash_core.tokenization.policies import apply_policies, drop_repeats
from dflash_core.tokenization.rows import ExactEncoder, Row, RowBatch, batch_of
from dflash_core.tokenization.shards import write_shard
from dflash_core.tokenization.tokenizer import load_tokenizer
from dflash_core.tokenization.turns import TurnRenderer

log = logging.getLogger(__name__)

ROWS_PER_BATCH = 512
CHARS_PER_BATCH = 4 << 20


SPELLED: dict[str | None, int] = {"inline": int(Flag.THOUGHT_INLINE), "reasoning": int(Flag.THOUGHT_IN_REASONING)}


class AuditFailed(Exception):
    """The fast path and the reference disagree about a row."""


class FileTokenizer:
    """Tokenizes files with one recipe; made once per process, because loading a tokenizer takes a second.

    Raises:
        RecipeError: the tokenizer or its chat template is missing or unusable.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        tokenizer = load_tokenizer(recipe)
        renderer = TurnRenderer(tokenizer, supervise_empty_thought=recipe.tokenization.supervise_empty_thought)
        self.reference = ExactEncoder(renderer, HuggingFace(tokenizer.reference), whole=True)
        backend = choose_backend(tokenizer, recipe.tokenization.backend)
        self.encoder: BatchEncoder | None = BatchEncoder(renderer, backend)
        """None once an audit has failed: everything is done by the reference from then on."""
        self._audited = False
        self.on_progress: Callable[[], None] = _nobody
        """Called after every batch of rows."""
        self.fingerprint = fingerprint_of(recipe, tokenizer.content_hash)

    def tokenize(self, body: bytes, source: SourceFile, sha256: str) -> TokenizedFile:
        """Everything that one file's bytes become.

        Raises:
            UnreadableFile: the file is broken as a whole.
        """
        try:
            return self._tokenize(body, source, sha256)
        except AuditFailed as failed:
            backend = self.encoder.backend.name if self.encoder else ""
            log.warning(
                "%s: %s gives other ids than the reference for %s; this file and all further ones are tokenized by the "
                "reference, which is slower",
                source.uri,
                backend,
                failed,
            )
            self.encoder = None
            return self._tokenize(body, source, sha256)

    def _tokenize(self, body: bytes, source: SourceFile, sha256: str) -> TokenizedFile:
        reading = CompletionFile(body, source.uri)
        rejects: list[Reject] = []
        batches: list[RowBatch] = []
        for completions in _chunks(reading, rejects):
            rows = self._rows(completions, rejects)
            self.on_progress()
            if rows:
                batches.append(apply_policies(batch_of(rows, self.recipe.tokenization.max_length), self.recipe))
        if self.recipe.tokenization.repeats == "drop":
            batches = drop_repeats(batches)
        rejects.sort(key=lambda reject: reject.line)
        dropped = [
            Reject(line=line, reason=reason)
            for batch in batches
            for line, reason in zip(batch.lines.tolist(), batch.dropped, strict=True)
            if reason is not None
        ]
        reasons = Counter(reject.reason for reject in [*rejects, *dropped])
        statistics = file_statistics(source.partition, rendered_rows(batches), rejects, reading.lines_read)
        lost = sorted([*rejects, *dropped], key=lambda reject: reject.line)
        return TokenizedFile(
            shard=write_shard(batches, self._metadata(source, sha256, statistics)),
            rejects="".join(reject.model_dump_json() + "\n" for reject in lost).encode(),
            statistics=statistics,
            reject_reasons=dict(sorted(reasons.items())),
        )

    def _rows(self, completions: Sequence[Completion], rejects: list[Reject]) -> list[Row]:
        every = self.recipe.tokenization.turns == "all"
        items = [(c, turn) for c in completions for turn in (c.turns if every else c.turns[-1:])]
        if self.encoder is None:
            results = [self._refer(item) for item in items]
        else:
            results = self.encoder.encode(items)
            self._audit(items, results)
        rows = []
        for (completion, turn), result in zip(items, results, strict=True):
            if isinstance(result, Refused):
                rejects.append(Reject(line=completion.line, reason=result.reason, detail=result.detail))
            else:
                spelled = SPELLED.get(completion.messages[turn].spelling)
                rows.append(replace(result, flags=result.flags | spelled) if spelled else result)
        return rows

    def _refer(self, item: Item) -> Row | Refused:
        try:
            return self.reference.encode(*item)
        except Refused as refused:
            return refused

    def _audit(self, items: Sequence[Item], results: Sequence[Row | Refused]) -> None:
        """Do a share of the rows again by the reference, the process's first row always.

        Raises:
            AuditFailed: a row differs.
        """
        below = int(self.recipe.tokenization.audit_share * (1 << 32))
        for item, result in zip(items, results, strict=True):
            name = item[0].turn_id(item[1]) if isinstance(result, Refused) else result.row_id
            if zlib.crc32(name.encode("utf8", "replace")) < below or not self._audited:
                self._audited = True
                if not _equal(result, self._refer(item)):
                    raise AuditFailed(f"row {name} in line {item[0].line}")

    def _metadata(self, source: SourceFile, sha256: str, statistics: FileStatistics) -> dict[str, str]:
        counts = {name: getattr(statistics, name) for name in ("rows_read", "rows_kept", "tokens", "supervised_tokens")}
        return {
            "fingerprint": self.fingerprint,
            "code_version": TOKENIZATION_VERSION,
            "source_key": source.key,
            "source_etag": source.etag,
            "source_sha256": sha256,
            "counts": json.dumps(counts),
        }


def rendered_rows(batches: Sequence[RowBatch]) -> RenderedRows:
    """All batches of one file as the columns that statistics are made of."""
    starts = [batch.start for batch in batches]
    none = [np.zeros(0, np.int64)]
    return RenderedRows(
        row_ids=[row_id for batch in batches for row_id in batch.row_ids],
        lines=np.concatenate([batch.lines for batch in batches] or none),
        lengths=np.concatenate([np.diff(batch.offsets) for batch in batches] or none),
        prompt_tokens=np.concatenate(starts or none),
        supervised=np.concatenate([batch.end - batch.start for batch in batches] or none),
        finish_reasons=[reason for batch in batches for reason in batch.finish_reasons],
        flags=np.concatenate([batch.flags for batch in batches] or none),
        text_hashes=np.concatenate(
            [hash_rows(batch.ids.view(np.uint32), batch.offsets) for batch in batches] or [np.zeros(0, np.uint64)]
        ),
        dropped=[reason for batch in batches for reason in batch.dropped],
    )


def _chunks(reading: CompletionFile, rejects: list[Reject]) -> Iterator[list[Completion]]:
    chunk: list[Completion] = []
    chars = 0
    for item in reading:
        if isinstance(item, Reject):
            rejects.append(item)
            continue
        chunk.append(item)
        chars += sum(len(message.content) + len(message.reasoning or "") for message in item.messages)
        if len(chunk) >= ROWS_PER_BATCH or chars >= CHARS_PER_BATCH:
            yield chunk
            chunk, chars = [], 0
    if chunk:
        yield chunk


def _equal(a: Row | Refused, b: Row | Refused) -> bool:
    if isinstance(a, Refused) or isinstance(b, Refused):
        return isinstance(a, Refused) and isinstance(b, Refused) and a.reason == b.reason
    same = (a.row_id, a.finish_reason, a.flags, a.start, a.end) == (b.row_id, b.finish_reason, b.flags, b.start, b.end)
    return same and np.array_equal(a.ids, b.ids)


def _nobody() -> None:
    """Nobody listens."""
