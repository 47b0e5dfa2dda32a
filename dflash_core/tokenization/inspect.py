"""Look at one row as training sees it: decoded from the stored ids, coloured by the stored mask, never from the text.

A row that policies dropped is in no shard, and yet it is the one that the gate names; it is rendered anew from the
source file by the same code and shown with the reason why it was dropped.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

import pyarrow as pa
from rich.console import Group, RenderableType
from rich.text import Text
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from dflash_core.errors import ObjectMissing, UserError
from dflash_core.quality.flags import Flag
from dflash_core.recipe import Recipe
from dflash_core.records import Reject, ShardManifest
from dflash_core.storage.keys import named_partition
from dflash_core.storage.store import Stores, open_stores
from dflash_core.tokenization.files import FileTokenizer
from dflash_core.tokenization.fingerprint import fingerprint
from dflash_core.tokenization.objects import Names, read_source
from dflash_core.tokenization.shards import read_shard
from dflash_core.tokenization.tokenizer import load_tokenizer

SUPERVISED = ("bold green", "bold cyan")
"""Two colours in turn, so that tokens can be told apart; both are legible on dark and on light."""
CONTEXT = "dim"
STYLE = """
body { font: 14px/1.5 system-ui, sans-serif; color: #1f2933; background: #f5f7f9; margin: 24px; }
h1 { font-size: 18px; margin: 0; } p { color: #66727f; margin: 4px 0 12px; } p.dropped { color: #d1404f; }
pre { font: 13px/1.6 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; background: #fff;
  border: 1px solid #e4e7eb; border-radius: 8px; padding: 16px; color: #8a95a1; }
.s { color: #0f3d26; background: #b7e4c7; } .t { color: #0f3d26; background: #95d5ab; }
"""


@dataclass(frozen=True)
class Piece:
    """One token, or the few that only together are whole characters."""

    ids: tuple[int, ...]
    text: str
    supervised: bool


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
    """Why the row is in no shard, rendered anew here; None: this is what is stored."""

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
        return f"{self.partition}, line {self.line}, row {self.row_id}"

    @property
    def summary(self) -> str:
        """Counts, finish reason and flags in one line."""
        parts = (f"{self.tokens:,} tokens, {self.supervised:,} supervised", f"finish reason {self.finish_reason}")
        return " · ".join((*parts, *self.flags))


def inspect_row(recipe: Recipe, address: str) -> InspectedRow:
    """Find a row by `FILE[:ROW]` and decode it.

    Args:
        recipe: names stores and tokenizer.
        address: FILE is a partition or the path below the source prefix, .jsonl or not; ROW a row id or else a line
            number, without it the file's first row.

    Raises:
        UserError: the file is not tokenized, there is no such row, or it was rejected (with the reason).
    """
    file, _, row = address.partition(":")
    partition = named_partition(file)
    stores, names = open_stores(recipe), Names(fingerprint(recipe), partition)
    try:
        manifest = stores.derived.get_record(names.manifest, ShardManifest)
    except ObjectMissing:
        raise UserError(
            f"{partition} has no shard with fingerprint {names.fingerprint}; tokenize it first, or correct the name"
        ) from None
    table = read_shard(stores.derived.read(manifest.shard))
    index = _find(table, row)
    if index is not None:
        return _inspected(recipe, partition, table.slice(index, 1), None)
    rejects = stores.derived.read(manifest.rejects).splitlines()
    return _lost_row(recipe, stores, manifest, row, [Reject.model_validate_json(line) for line in rejects])


def to_terminal(row: InspectedRow) -> RenderableType:
    """For rich: context dim, supervised tokens in colour; control characters are made visible, never sent."""
    body = Text()
    for number, piece in enumerate(row.pieces):
        body.append(_visible(piece.text, piece.supervised), SUPERVISED[number % 2] if piece.supervised else CONTEXT)
    head = [Text(_visible(row.title, False), "bold"), Text(_visible(row.summary, False), "dim")]
    if row.dropped:
        head.append(Text(f"in no shard: {row.dropped}; rendered anew from the source file", "red"))
    return Group(*head, Text(), body)


def to_html(row: InspectedRow) -> str:
    """One page that needs nothing else; a token's id shows under the pointer."""
    spans = (
        f'<span class="{"st"[number % 2] if piece.supervised else "c"}" title="{" ".join(map(str, piece.ids))}">'
        f"{escape(_visible(piece.text, piece.supervised))}</span>"
        for number, piece in enumerate(row.pieces)
    )
    dropped = f'<p class="dropped">in no shard: {escape(row.dropped)}; rendered anew</p>' if row.dropped else ""
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(row.title)}</title>'
        f"<style>{STYLE}</style></head><body><h1>{escape(row.title)}</h1><p>{escape(row.summary)}</p>{dropped}"
        f"<pre>{''.join(spans)}</pre></body></html>\n"
    )


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


def _find(table: pa.Table, row: str) -> int | None:
    """Index of a row by id, else by line; the first row for an empty name."""
    if not row:
        return 0 if len(table) else None
    ids = table.column("row_id").to_pylist()
    if row in ids:
        return int(ids.index(row))
    lines = table.column("source_line").to_pylist()
    return int(lines.index(int(row))) if row.isdecimal() and int(row) in lines else None


def _inspected(recipe: Recipe, partition: str, table: pa.Table, dropped: str | None) -> InspectedRow:
    (row,) = table.to_pylist()
    ids = row["input_ids"]
    mask = [False] * len(ids)
    for span in row["loss_spans"]:
        mask[span["start"] : span["end"]] = [True] * (span["end"] - span["start"])
    return InspectedRow(
        partition=partition,
        row_id=row["row_id"],
        line=row["source_line"],
        finish_reason=row["finish_reason"],
        flags=tuple((flag.name or "").lower().replace("_", " ") for flag in Flag(row["flags"])),
        pieces=tuple(pieces_of(load_tokenizer(recipe).reference, ids, mask)),
        dropped=dropped,
    )


def _lost_row(
    recipe: Recipe, stores: Stores, manifest: ShardManifest, row: str, rejects: Sequence[Reject]
) -> InspectedRow:
    """A row that is in no shard: rendered anew under policies that drop nothing, if it can be rendered at all."""
    lenient = {"min_supervised_tokens": 1, "truncation": "cut", "truncated_thinking": "keep", "repeats": "keep"}
    rules = recipe.tokenization.model_copy(update=lenient)
    tokenizer = FileTokenizer(recipe.model_copy(update={"tokenization": rules}))
    source = manifest.source
    body = read_source(stores, source)
    table = read_shard(tokenizer.tokenize(body.body, source, body.sha256).shard)
    index = _find(table, row)
    line = table.column("source_line")[index].as_py() if index is not None else int(row) if row.isdecimal() else None
    reject = next((reject for reject in rejects if reject.line == line), None)
    if index is None or reject is None:
        why = f": {reject.reason} {reject.detail}".rstrip() if reject else ""
        raise UserError(
            f"{source.uri} has no row {row!r} that can be shown{why}; name a row by its id or its line (from 1)"
        )
    return _inspected(recipe, source.partition, table.slice(index, 1), reject.reason)


def _visible(text: str, ends: bool) -> str:
    """Control characters as their pictures (U+2400 and on); with `ends` a mark before each line break."""
    shown = "".join(
        chr(0x2400 + ord(c)) if ord(c) < 32 and c not in "\n\t" else "�" if 0x7F <= ord(c) < 0xA0 else c for c in text
    )
    return shown.replace("\n", "↵\n") if ends else shown
