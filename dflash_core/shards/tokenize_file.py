"""One source file's bytes -> its shard, statistics and rejects; and storing them, the manifest last.

Everything about a row is decided here in one process and one pass, so equal bytes give equal results and running a file
twice is harmless.
"""

import json
import logging
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dflash_core import TOKENIZATION_VERSION
from dflash_core.completions.completion import Completion, Rejected
from dflash_core.completions.read import CompletionFile
from dflash_core.completions.repetition import repetition_loops
from dflash_core.errors import UnreadableFile
from dflash_core.recipe import Recipe, TokenizationSettings
from dflash_core.records import Reject, ShardManifest, SourceFile
from dflash_core.shards.arrow import write_shard
from dflash_core.statistics.duplicates import hash_rows
from dflash_core.statistics.statistics import FileStatistics, file_statistics
from dflash_core.storage.layout import ShardKeys
from dflash_core.storage.s3 import Store
from dflash_core.tokenization.backends import HuggingFaceBackend, choose_backend
from dflash_core.tokenization.encode import EncodedRow, ExactEncoder, RowColumns, columns_of
from dflash_core.tokenization.fast_encoder import FastEncoder
from dflash_core.tokenization.flags import Flag
from dflash_core.tokenization.tokenizer import fingerprint, load_tokenizer
from dflash_core.tokenization.turns import TurnRenderer

log = logging.getLogger(__name__)

ROWS_PER_BATCH = 512
CHARS_PER_BATCH = 4 << 20
TOP_REASONS = 3
SPELLED: dict[str | None, int] = {"inline": int(Flag.THOUGHT_INLINE), "reasoning": int(Flag.THOUGHT_IN_REASONING)}


@dataclass(frozen=True)
class TokenizedFile:
    """What one file becomes, before it is stored."""

    shard: bytes
    rejects: bytes
    """JSON lines of `Reject`: rejected and dropped rows."""
    statistics: FileStatistics


class AuditFailed(Exception):
    """The fast path and the reference disagree about a row."""


class FileTokenizer:
    """Tokenizes files with one recipe; made once per process, because loading a tokenizer takes a second.

    Raises:
        RecipeError: the tokenizer or its chat template is missing or unusable.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.rules = recipe.tokenization
        self._min_supervised = recipe.min_supervised_tokens
        tokenizer = load_tokenizer(recipe.tokenizer_path, self.rules)
        renderer = TurnRenderer(tokenizer, supervise_empty_thought=self.rules.supervise_empty_thought)
        self.reference = ExactEncoder(renderer, HuggingFaceBackend(tokenizer.reference), whole=True)
        self.encoder: FastEncoder | None = FastEncoder(renderer, choose_backend(tokenizer, self.rules.backend))
        """None once an audit has failed: everything is done by the reference from then on."""
        self._audited = False
        self.on_progress: Callable[[], None] = _nobody
        """Called after every batch of rows."""
        self.fingerprint = fingerprint(recipe, tokenizer.content_hash)

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
        reading = CompletionFile(body, source.uri, self.rules.turns)
        rejects: list[Reject] = []
        batches: list[RowColumns] = []
        for completions in _chunks(reading, rejects):
            rows = self._rows(completions, rejects)
            self.on_progress()
            if rows:
                columns = columns_of(rows, self.rules.max_length)
                batches.append(apply_policies(columns, self.rules, self._min_supervised))
        if self.rules.repeats == "drop":
            batches = drop_repeats(batches)
        rejects.sort(key=lambda reject: reject.line)
        statistics = file_statistics(source.partition, batches, rejects, reading.lines_read)
        dropped = [
            Reject(line=line, reason=reason)
            for batch in batches
            for line, reason in zip(batch.lines.tolist(), batch.dropped, strict=True)
            if reason is not None
        ]
        lost = sorted([*rejects, *dropped], key=lambda reject: reject.line)
        return TokenizedFile(
            shard=write_shard(batches, self._metadata(source, sha256, statistics)),
            rejects="".join(reject.model_dump_json() + "\n" for reject in lost).encode(),
            statistics=statistics,
        )

    def _rows(self, completions: Sequence[Completion], rejects: list[Reject]) -> list[EncodedRow]:
        if self.encoder is None:
            results = [self.reference.encode(completion) for completion in completions]
        else:
            results = self.encoder.encode(completions)
            self._audit(completions, results)
        rows = []
        for completion, result in zip(completions, results, strict=True):
            if isinstance(result, Rejected):
                rejects.append(Reject(line=completion.line, reason=result.reason, detail=result.detail))
            else:
                spelled = SPELLED.get(completion.messages[-1].spelling)
                rows.append(replace(result, flags=result.flags | spelled) if spelled else result)
        return rows

    def _audit(self, completions: Sequence[Completion], results: Sequence[EncodedRow | Rejected]) -> None:
        """Do a share of the rows again by the reference, the process's first row always.

        Raises:
            AuditFailed: a row differs.
        """
        below = int(self.rules.audit_share * (1 << 32))
        for completion, result in zip(completions, results, strict=True):
            if zlib.crc32(completion.row_id.encode("utf8", "replace")) < below or not self._audited:
                self._audited = True
                if not _equal(result, self.reference.encode(completion)):
                    raise AuditFailed(f"row {completion.row_id} in line {completion.line}")

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


def apply_policies(batch: RowColumns, rules: TokenizationSettings, min_supervised: int) -> RowColumns:
    """Cut the spans of rows whose ids `columns_of` has cut, mark them and say which are dropped and why.

    A policy never makes a row vanish: it stays in the batch with its reason, so that statistics and gate count it.

    Args:
        batch: its ids are cut at `rules.max_length`.
        rules: how long a row may be, and what becomes of longer ones and of thoughts that were cut.
        min_supervised: fewest supervised tokens a row may have.
    """
    clipped = batch.end > rules.max_length
    flags = np.where(clipped, batch.flags | int(Flag.CLIPPED | Flag.NO_TERMINATOR), batch.flags)
    end = np.minimum(batch.end, rules.max_length)
    start = np.minimum(batch.start, end)
    terminated = (flags & int(Flag.NO_TERMINATOR)) == 0
    row = batch.offsets[:-1]
    loops = repetition_loops(batch.ids.view(np.uint32), row + start, row + end - terminated)
    flags |= np.where(loops, int(Flag.REPETITION_LOOP), 0)
    supervised = end - start
    dropped = np.full(len(batch), None, object)
    # The reason that explains most comes last and wins.
    dropped[supervised < min_supervised] = "too few supervised tokens"
    dropped[supervised == 0] = "no supervised token"
    if rules.truncated_thinking == "reject":
        dropped[(flags & int(Flag.TRUNCATED_IN_THOUGHT)) != 0] = "truncated in the thought"
    if rules.truncation == "drop":
        dropped[clipped] = "longer than max_length"
    return replace(batch, flags=flags, start=start, end=end, dropped=dropped.tolist())


def drop_repeats(batches: Sequence[RowColumns]) -> list[RowColumns]:
    """Drop the rows of a file whose ids are those of an earlier row of it."""
    seen: set[int] = set()
    done = []
    for batch in batches:
        dropped = list(batch.dropped)
        for i, text in enumerate(hash_rows(batch.ids, batch.offsets).tolist()):
            if text in seen and dropped[i] is None:
                dropped[i] = "repeats an earlier row"
            seen.add(text)
        done.append(replace(batch, dropped=dropped))
    return done


def store_file(derived: Store, keys: ShardKeys, source: SourceFile, sha256: str, made: TokenizedFile) -> ShardManifest:
    """Write the objects, the manifest last: a writer that dies earlier leaves orphans that the next run overwrites.

    Also those of a file of which no row survives: its statistics count in the gate, so that a wholly bad file cannot
    pass where a mostly bad one fails.

    Raises:
        UnreadableFile: no row survives; the sentence holds the top reasons.
        StorageError: the store refuses.
    """
    statistics = made.statistics
    manifest = ShardManifest(
        fingerprint=keys.fingerprint,
        code_version=TOKENIZATION_VERSION,
        source=source,
        source_sha256=sha256,
        shard=derived.put(keys.shard, made.shard, "application/vnd.apache.arrow.file"),
        rejects=derived.put(keys.rejects, made.rejects, "application/jsonl"),
        statistics=derived.put_record(keys.statistics, statistics),
        rows_read=statistics.rows_read,
        rows_kept=statistics.rows_kept,
        rows_dropped=statistics.rows_dropped,
        rows_rejected=statistics.rows_rejected,
        drop_reasons=statistics.dropped,
        reject_reasons=statistics.rejected,
        tokens=statistics.tokens,
        supervised_tokens=statistics.supervised_tokens,
    )
    derived.put_record(keys.manifest, manifest)
    if not statistics.rows_kept:
        raise UnreadableFile(_nothing_kept(source, statistics))
    return manifest


def _nothing_kept(source: SourceFile, statistics: FileStatistics) -> str:
    if not statistics.rows_read:
        return f"{source.uri} is empty; remove it or write completions into it"
    reasons = Counter({**statistics.rejected, **statistics.dropped})
    top = "; ".join(f"{reason} ({count})" for reason, count in reasons.most_common(TOP_REASONS))
    return f"{source.uri}: none of {statistics.rows_read} rows survives: {top}; correct the file or the recipe"


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


def _equal(a: EncodedRow | Rejected, b: EncodedRow | Rejected) -> bool:
    if isinstance(a, Rejected) or isinstance(b, Rejected):
        return isinstance(a, Rejected) and isinstance(b, Rejected) and a.reason == b.reason
    same = (a.row_id, a.finish_reason, a.flags, a.start, a.end) == (b.row_id, b.finish_reason, b.flags, b.start, b.end)
    return same and np.array_equal(a.ids, b.ids)


def _nobody() -> None:
    """Nobody listens."""
