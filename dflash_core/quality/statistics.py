"""Statistics of one file, and of all files merged exactly.

Everything is a count, an exact sparse histogram or a set of 64-bit hashes, so merging is addition and the merged
numbers equal those of one big file; medians and quantiles are read off the merged histogram. The price is some
25 KB of JSON for a file of 500 rows, mostly the hashes that find duplicates across files.

Every rendered row is counted, also one that was then dropped: dropping never makes the numbers better.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from dflash_core.quality.duplicates import Duplicates, HashedRows, find_duplicates
from dflash_core.quality.flags import Flag
from dflash_core.quality.hashes import U64, hash_strings, pack, unpack
from dflash_core.quality.histogram import Histogram, histogram, merge_histograms
from dflash_core.quality.spikes import spike_window
from dflash_core.records import Record, Reject

WORST_ROWS = 10
EXAMPLE_VALUES = 16

AnyKey = TypeVar("AnyKey", int, str)
Value = TypeVar("Value")


@dataclass(frozen=True)
class RenderedRows:
    """Columns over the n rendered rows of one file: kept ones and those dropped after rendering, in file order."""

    row_ids: Sequence[str]
    lines: NDArray[np.int64]
    """Line in the source file, from 1; several rows share a line where every assistant turn is a row."""
    lengths: NDArray[np.int64]
    """Tokens in the row, prompt included, as stored (after the cut at max_length)."""
    prompt_tokens: NDArray[np.int64]
    supervised: NDArray[np.int64]
    """Tokens that count in the loss."""
    finish_reasons: Sequence[str | None]
    flags: NDArray[np.int64]
    """`Flag` bits."""
    text_hashes: U64
    """`hashes.hash_rows` of the row's ids, or any other hash that is equal where the text is."""
    dropped: Sequence[str | None]
    """Why the row is not in the shard; None: it is."""

    def __post_init__(self) -> None:
        lengths = {name: len(column) for name, column in vars(self).items()}
        if len(set(lengths.values())) != 1:
            raise ValueError(f"columns of different lengths: {lengths}")

    def __len__(self) -> int:
        return len(self.row_ids)


class RowExample(Record):
    """One row, for a person to look up."""

    partition: str
    row_id: str
    line: int
    tokens: int
    supervised: int
    flags: int
    dropped: str | None = None


class RejectExample(Record):
    """The first row rejected for some reason."""

    partition: str
    line: int
    detail: str = ""


class Spike(Record):
    """Supervised-token values low..high that hold an implausible share of all rendered rows."""

    low: int
    high: int
    rows: int
    share: float
    example: RowExample | None


class Counts(Record):
    """What one file's statistics and those of all files have in common; all of it adds up."""

    lines_read: int
    """Lines with something in them."""
    rows_read: int
    """Rendered + rejected; more than the lines where every assistant turn is a row."""
    rows_rendered: int
    """Kept + dropped."""
    rows_kept: int
    dropped: dict[str, int]
    """Rendered, then dropped: reason -> rows."""
    rejected: dict[str, int]
    """Never rendered: reason -> rows."""
    tokens: int
    """Of kept rows, as are the next two."""
    supervised_tokens: int
    prompt_tokens: int
    supervised: Histogram
    """Supervised tokens a row, over all rendered rows, as are the next three."""
    lengths: Histogram
    finish_reasons: dict[str, int]
    flag_sets: Histogram
    """Combination of `Flag` bits -> rows; `flag_counts` takes it apart."""
    reject_examples: dict[str, RejectExample]
    """Reason -> first row rejected for it."""
    drop_examples: dict[str, RowExample]
    flag_examples: dict[str, RowExample]
    """Flag name -> first row with it."""
    worst_rows: tuple[RowExample, ...]
    """Fewest supervised tokens first."""
    duplicates: Duplicates
    spike: Spike | None

    @property
    def rows_rejected(self) -> int:
        """Never rendered, whatever the reason."""
        return sum(self.rejected.values())

    @property
    def flag_counts(self) -> dict[str, int]:
        """Flag name -> rows with it, in the order of `Flag`."""
        counts = {flag.name or "": self.flagged(flag) for flag in Flag}
        return {name: rows for name, rows in counts.items() if rows}

    def flagged(self, any_of: Flag) -> int:
        """Rendered rows with at least one of these flags."""
        return sum(rows for bits, rows in self.flag_sets.items() if bits & any_of)


class FileStatistics(Counts):
    """Statistics of one file: loss_mask_stats/<fingerprint>/<partition>.json."""

    partition: str
    value_examples: dict[int, RowExample]
    """A row at each of the most frequent supervised-token values."""
    lines: str
    """`hashes.pack` of the rendered rows' lines, as the next two."""
    id_hashes: str
    text_hashes: str


class MergedStatistics(Counts):
    """The same over all files: what the statistics of their concatenation would be."""

    files: int


def file_statistics(partition: str, rows: RenderedRows, rejects: Sequence[Reject], lines_read: int) -> FileStatistics:
    """Statistics of one file.

    Args:
        partition: its partition key.
        rows: all rendered rows.
        rejects: rows that were never rendered (a row dropped after rendering is in `rows`, not in here).
        lines_read: all lines, blank ones too, counted by the reader.

    Raises:
        ValueError: a line is neither rendered nor rejected (row conservation).
    """
    accounted = np.union1d(rows.lines, np.array([reject.line for reject in rejects], np.int64)).size
    if accounted != lines_read:
        raise ValueError(f"{partition}: {lines_read} lines were read, but {accounted} are rendered or rejected")
    kept = np.array([reason is None for reason in rows.dropped], bool)
    id_hashes = hash_strings(rows.row_ids)
    examples = _Examples(partition, rows)
    supervised = histogram(rows.supervised)
    frequent = sorted(supervised, key=lambda value: (-supervised[value], value))[:EXAMPLE_VALUES]
    value_examples = {value: examples.at(int(np.argmax(rows.supervised == value))) for value in frequent}
    worst = np.lexsort((np.arange(len(rows)), rows.supervised))[:WORST_ROWS]
    return FileStatistics(
        partition=partition,
        lines_read=lines_read,
        rows_read=len(rows) + len(rejects),
        rows_rendered=len(rows),
        rows_kept=int(kept.sum()),
        dropped=_add([Counter(reason for reason in rows.dropped if reason is not None)]),
        rejected=_add([Counter(reject.reason for reject in rejects)]),
        tokens=int(rows.lengths[kept].sum()),
        supervised_tokens=int(rows.supervised[kept].sum()),
        prompt_tokens=int(rows.prompt_tokens[kept].sum()),
        supervised=supervised,
        lengths=histogram(rows.lengths),
        finish_reasons=_add([Counter(reason or "unknown" for reason in rows.finish_reasons)]),
        flag_sets=histogram(rows.flags),
        reject_examples=_first(
            {r.reason: RejectExample(partition=partition, line=r.line, detail=_printable(r.detail))} for r in rejects
        ),
        drop_examples=_first({why: examples.at(i)} for i, why in enumerate(rows.dropped) if why is not None),
        flag_examples=examples.of_flags(),
        value_examples=value_examples,
        worst_rows=tuple(examples.at(i) for i in worst.tolist()),
        duplicates=find_duplicates([HashedRows(partition, rows.lines, id_hashes, rows.text_hashes)]),
        spike=find_spike(supervised, value_examples),
        lines=pack(rows.lines),
        id_hashes=pack(id_hashes),
        text_hashes=pack(rows.text_hashes),
    )


def merge_statistics(files: Iterable[FileStatistics]) -> MergedStatistics:
    """Add the statistics of all files up, exactly, whatever their order.

    Raises:
        ValueError: two of them are of the same partition.
    """
    ordered = sorted(files, key=lambda file: file.partition)
    if len({file.partition for file in ordered}) != len(ordered):
        raise ValueError("two statistics of the same partition cannot be merged")
    supervised = merge_histograms(f.supervised for f in ordered)
    worst = sorted((row for f in ordered for row in f.worst_rows), key=lambda row: row.supervised)
    hashed = [
        HashedRows(f.partition, unpack(f.lines).astype(np.int64), unpack(f.id_hashes), unpack(f.text_hashes))
        for f in ordered
    ]
    return MergedStatistics(
        files=len(ordered),
        lines_read=sum(f.lines_read for f in ordered),
        rows_read=sum(f.rows_read for f in ordered),
        rows_rendered=sum(f.rows_rendered for f in ordered),
        rows_kept=sum(f.rows_kept for f in ordered),
        dropped=_add(f.dropped for f in ordered),
        rejected=_add(f.rejected for f in ordered),
        tokens=sum(f.tokens for f in ordered),
        supervised_tokens=sum(f.supervised_tokens for f in ordered),
        prompt_tokens=sum(f.prompt_tokens for f in ordered),
        supervised=supervised,
        lengths=merge_histograms(f.lengths for f in ordered),
        finish_reasons=_add(f.finish_reasons for f in ordered),
        flag_sets=merge_histograms(f.flag_sets for f in ordered),
        reject_examples=_first(f.reject_examples for f in ordered),
        drop_examples=_first(f.drop_examples for f in ordered),
        flag_examples=_first(f.flag_examples for f in ordered),
        worst_rows=tuple(worst[:WORST_ROWS]),
        duplicates=find_duplicates(hashed),
        spike=find_spike(supervised, _first(f.value_examples for f in ordered)),
    )


def find_spike(supervised: Histogram, examples: Mapping[int, RowExample]) -> Spike | None:
    """The one place that holds an implausible share of the rows, or None.

    Merged over files it has an example wherever some file has the value among its `EXAMPLE_VALUES` most frequent ones.
    """
    window = spike_window(supervised)
    if window is None:
        return None
    low, high, rows = window
    inside = sorted((v for v in range(low, high + 1) if v in supervised), key=lambda v: -supervised[v])
    example = next((examples[value] for value in inside if value in examples), None)
    return Spike(low=low, high=high, rows=rows, share=rows / sum(supervised.values()), example=example)


@dataclass(frozen=True)
class _Examples:
    partition: str
    rows: RenderedRows

    def at(self, index: int) -> RowExample:
        rows = self.rows
        return RowExample(
            partition=self.partition,
            row_id=_printable(rows.row_ids[index]),
            line=int(rows.lines[index]),
            tokens=int(rows.lengths[index]),
            supervised=int(rows.supervised[index]),
            flags=int(rows.flags[index]),
            dropped=rows.dropped[index],
        )

    def of_flags(self) -> dict[str, RowExample]:
        found = ((flag, np.flatnonzero(self.rows.flags & flag.value)) for flag in Flag)
        return {flag.name or "": self.at(int(where[0])) for flag, where in found if where.size}


def _printable(text: str) -> str:
    """Lone surrogates, which no JSON file can hold, as question marks."""
    return text.encode("utf8", "replace").decode()


def _add(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Sum by key, most frequent first, then by name."""
    total: Counter[str] = Counter()
    for one in counts:
        total.update(one)
    return dict(sorted(total.items(), key=lambda item: (-item[1], item[0])))


def _first(mappings: Iterable[Mapping[AnyKey, Value]]) -> dict[AnyKey, Value]:
    """Union, in which the first mapping with a key wins."""
    union: dict[AnyKey, Value] = {}
    for mapping in mappings:
        for key, value in mapping.items():
            union.setdefault(key, value)
    return union
