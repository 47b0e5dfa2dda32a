"""Look at one row as training sees it: decoded from the stored ids, coloured by the stored mask, never from the text.

A row that policies dropped is in no shard, and yet it is the one that the gate names; it is rendered again from the
source file by the same code and shown with the reason why it was dropped.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from dflash_core.errors import ObjectMissing, UserError
from dflash_core.records import Reject, ShardManifest
from dflash_core.shards.arrow import read_shard
from dflash_core.shards.overlap import read_source
from dflash_core.shards.tokenize_file import FileTokenizer
from dflash_core.storage.layout import ShardKeys
from dflash_core.storage.partitions import named_partition
from dflash_core.tokenization.flags import Flag
from dflash_core.tokenization.tokenizer import fingerprint, load_tokenizer
from dflash_core.workspace import Workspace


@dataclass(frozen=True)
class Piece:
    """One token, or the few that only together are whole characters."""

    ids: tuple[int, ...]
    text: str
    supervised: bool

    @property
    def visible(self) -> str:
        """Control characters as their pictures (U+2400 and on), a mark before each supervised line break."""
        return visible(self.text, self.supervised)


@dataclass(frozen=True)
class InspectedRow:
    """A row and everything that is stored of it."""

    partition: str
    row_id: str
    line: int
    finish_reason: str
    flags: tuple[str, ...]
    pieces: tuple[Piece, ...]
    dropped: str | None
    """Why the row is in no shard, rendered again here; None: this is what is stored."""

    @property
    def tokens(self) -> int:
        """Tokens in the row."""
        return sum(len(piece.ids) for piece in self.pieces)

    @property
    def supervised(self) -> int:
        """Those that count in the loss."""
        return sum(len(piece.ids) for piece in self.pieces if piece.supervised)

    @property
    def title(self) -> str:
        """File, line and row in one line."""
        return visible(f"{self.partition}, line {self.line}, row {self.row_id}", False)

    @property
    def summary(self) -> str:
        """Counts, finish reason and flags in one line."""
        parts = (f"{self.tokens:,} tokens, {self.supervised:,} supervised", f"finish reason {self.finish_reason}")
        return " · ".join((*parts, *self.flags))


def inspect_row(workspace: Workspace, address: str) -> InspectedRow:
    """Find a row by `FILE[:ROW]` and decode it.

    Args:
        workspace: names stores and tokenizer.
        address: FILE is a partition or the path below the source prefix, .jsonl or not; ROW a row id or else a line
            number, without it the file's first row.

    Raises:
        UserError: the file is not tokenized, there is not such a row, or it was rejected (with the reason).
    """
    file, _, row = address.partition(":")
    partition = named_partition(file)
    keys, derived = ShardKeys(fingerprint(workspace.recipe), partition), workspace.derived
    try:
        manifest = derived.get_record(keys.manifest, ShardManifest)
    except ObjectMissing:
        raise UserError(
            f"{partition} has no shard with fingerprint {keys.fingerprint}; tokenize it first, or correct the name"
        ) from None
    table = read_shard(derived.read(manifest.shard))
    index = _find(table, row)
    if index is not None:
        return _inspected(workspace, partition, table.slice(index, 1), None)
    rejects = derived.read(manifest.rejects).splitlines()
    return _lost_row(workspace, manifest, row, [Reject.model_validate_json(line) for line in rejects])


def pieces_of(tokenizer: Tokenizer, ids: Sequence[int], mask: Sequence[bool]) -> Iterator[Piece]:
    """Decode token by token; ids that are whole characters only together stay together, unless the mask parts them.

    Args:
        tokenizer: the reference tokenizer.
        ids: of one row.
        mask: supervised or not, one an id.
    """
    stream, held = DecodeStream(skip_special_tokens=False), list[int]()
    for place, (token, supervised) in enumerate(zip(ids, mask, strict=True)):
        held.append(token)
        text = stream.step(tokenizer, token)
        last = place + 1 == len(ids)
        if text is None and (last or mask[place + 1] != supervised):
            text = tokenizer.decode(held, skip_special_tokens=False)
            stream = DecodeStream(skip_special_tokens=False)
        if text is not None:
            yield Piece(tuple(held), text, supervised)
            held = []


def visible(text: str, ends: bool) -> str:
    """Control characters as their pictures (U+2400 and on); with `ends` a mark before each line break."""
    shown = "".join(
        chr(0x2400 + ord(c)) if ord(c) < 32 and c not in "\n\t" else "�" if 0x7F <= ord(c) < 0xA0 else c for c in text
    )
    return shown.replace("\n", "↵\n") if ends else shown


def _find(table: pa.Table, row: str) -> int | None:
    """Index of a row by id, else by line; the first row for an empty name."""
    if not row:
        return 0 if len(table) else None
    ids = table.column("row_id").to_pylist()
    if row in ids:
        return int(ids.index(row))
    lines = table.column("source_line").to_pylist()
    return int(lines.index(int(row))) if row.isdecimal() and int(row) in lines else None


def _inspected(workspace: Workspace, partition: str, table: pa.Table, dropped: str | None) -> InspectedRow:
    (row,) = table.to_pylist()
    ids = row["input_ids"]
    mask = [False] * len(ids)
    for span in row["loss_spans"]:
        mask[span["start"] : span["end"]] = [True] * (span["end"] - span["start"])
    tokenizer = load_tokenizer(workspace.recipe.tokenizer_path, workspace.recipe.tokenization)
    return InspectedRow(
        partition=partition,
        row_id=row["row_id"],
        line=row["source_line"],
        finish_reason=row["finish_reason"],
        flags=tuple((flag.name or "").lower().replace("_", " ") for flag in Flag(row["flags"])),
        pieces=tuple(pieces_of(tokenizer.reference, ids, mask)),
        dropped=dropped,
    )


def _lost_row(workspace: Workspace, manifest: ShardManifest, row: str, rejects: Sequence[Reject]) -> InspectedRow:
    """A row that is in no shard: rendered again under policies that drop nothing, if it can be rendered at all."""
    lenient = {"min_supervised_tokens": 1, "truncation": "cut", "truncated_thinking": "keep", "repeats": "keep"}
    rules = workspace.recipe.tokenization.model_copy(update=lenient)
    tokenizer = FileTokenizer(workspace.recipe.model_copy(update={"tokenization": rules}))
    source = manifest.source
    body = read_source(workspace.source, source)
    table = read_shard(tokenizer.tokenize(body.body, source, body.sha256).shard)
    index = _find(table, row)
    line = table.column("source_line")[index].as_py() if index is not None else int(row) if row.isdecimal() else None
    reject = next((reject for reject in rejects if reject.line == line), None)
    if index is None or reject is None:
        why = f": {reject.reason} {reject.detail}".rstrip() if reject else ""
        raise UserError(
            f"{source.uri} has no row {row!r} that can be shown{why}; name a row by its id or its line (from 1)"
        )
    return _inspected(workspace, source.partition, table.slice(index, 1), reject.reason)
