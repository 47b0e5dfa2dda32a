"""Statistics of one file, in a form that adds up: those of many files are in `merge`.

Everything is a count, an exact sparse histogram or a set of 64-bit hashes, so the merged numbers equal those of one big
file; medians and quantiles are read off the merged histogram. The price is some 25 KB of JSON for a file of 500 rows,
mostly the hashes that find duplicates across files.

Every rendered row is counted, also one that was then dropped: dropping never makes the numbers better.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from dflash_core.records import Record, Reject
from dflash_core.statistics.duplicates import U64, Duplicates, duplicates_within, hash_rows, hash_strings, pack
from dflash_core.statistics.histogram import Histogram, histogram, spike_window
from dflash_core.tokenization.encode import RowColumns
from dflash_core.tokenization.flags import Flag

WORST_ROWS = 10
EXAMPLE_VALUES = 16

AnyKey = TypeVar("AnyKey", int, str)
Value = TypeVar("Value")


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

    @property
    def place(self) -> str:
        """`6` or `6 to 8`."""
        return f"{self.low}" if self.low == self.high else f"{self.low} to {self.high}"


class Counts(Record):
    """What one file's statistics and those of all files have in common; all of it adds up."""

    lines_read: int
    """Lines with something in them."""
    rows_read: int
    """Rendered + rejected; more than the lines where every answer is a row."""
    rows_rendered: int
    """Kept + dropped."""
    rows_kept: int
    dropped: dict[str, int]
    """Rendered, then dropped by a policy: reason -> rows."""
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
    def rows_dropped(self) -> int:
        """Rendered and then dropped, whatever the reason."""
        return sum(self.dropped.values())

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
    """`duplicates.pack` of the rendered rows' lines, as the next two."""
    id_hashes: str
    text_hashes: str


class MergedStatistics(Counts):
    """The same over all files: what the statistics of their concatenation would be."""

    files: int


def file_statistics(
    partition: str, batches: Sequence[RowColumns], rejects: Sequence[Reject], lines_read: int
) -> FileStatistics:
    """Statistics of one file.

    Args:
        partition: its partition key.
        batches: all rendered rows, in file order.
        rejects: rows that were never rendered (a row dropped after rendering is in `batches`, not in here).
        lines_read: all lines, blank ones too, counted by the reader.

    Raises:
        ValueError: a line is neither rendered nor rejected (row conservation).
    """
    rows = _FileRows.of(partition, batches)
    accounted = np.union1d(rows.lines, np.array([reject.line for reject in rejects], np.int64)).size
    if accounted != lines_read:
        raise ValueError(f"{partition}: {lines_read} lines were read, but {accounted} are rendered or rejected")
    kept = np.array([reason is None for reason in rows.dropped], bool)
    id_hashes = hash_strings(rows.row_ids)
    supervised = histogram(rows.supervised)
    frequent = sorted(supervised, key=lambda value: (-supervised[value], value))[:EXAMPLE_VALUES]
    value_examples = {value: rows.example(int(np.argmax(rows.supervised == value))) for value in frequent}
    worst = np.lexsort((np.arange(len(rows.row_ids)), rows.supervised))[:WORST_ROWS]
    return FileStatistics(
        partition=partition,
        lines_read=lines_read,
        rows_read=len(rows.row_ids) + len(rejects),
        rows_rendered=len(rows.row_ids),
        rows_kept=int(kept.sum()),
        dropped=add_counts([Counter(reason for reason in rows.dropped if reason is not None)]),
        rejected=add_counts([Counter(reject.reason for reject in rejects)]),
        tokens=int(rows.lengths[kept].sum()),
        supervised_tokens=int(rows.supervised[kept].sum()),
        prompt_tokens=int(rows.prompt_tokens[kept].sum()),
        supervised=supervised,
        lengths=histogram(rows.lengths),
        finish_reasons=add_counts([Counter(reason or "unknown" for reason in rows.finish_reasons)]),
        flag_sets=histogram(rows.flags),
        reject_examples=first_of(
            {r.reason: RejectExample(partition=partition, line=r.line, detail=_printable(r.detail))} for r in rejects
        ),
        drop_examples=first_of({why: rows.example(i)} for i, why in enumerate(rows.dropped) if why is not None),
        flag_examples=rows.flag_examples(),
        value_examples=value_examples,
        worst_rows=tuple(rows.example(i) for i in worst.tolist()),
        duplicates=duplicates_within(partition, rows.lines, id_hashes, rows.text_hashes),
        spike=find_spike(supervised, value_examples),
        lines=pack(rows.lines),
        id_hashes=pack(id_hashes),
        text_hashes=pack(rows.text_hashes),
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


def add_counts(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Sum by key, most frequent first, then by name."""
    total: Counter[str] = Counter()
    for one in counts:
        total.update(one)
    return dict(sorted(total.items(), key=lambda item: (-item[1], item[0])))


def first_of(mappings: Iterable[Mapping[AnyKey, Value]]) -> dict[AnyKey, Value]:
    """Union, in which the first mapping with a key wins."""
    union: dict[AnyKey, Value] = {}
    for mapping in mappings:
        for key, value in mapping.items():
            union.setdefault(key, value)
    return union


@dataclass(frozen=True)
class _FileRows:
    """All rendered rows of a file, as the columns that are counted."""

    partition: str
    row_ids: list[str]
    lines: NDArray[np.int64]
    lengths: NDArray[np.int64]
    """Tokens in the row, prompt included, as stored (after the cut at max_length)."""
    prompt_tokens: NDArray[np.int64]
    supervised: NDArray[np.int64]
    flags: NDArray[np.int64]
    finish_reasons: list[str | None]
    dropped: list[str | None]
    text_hashes: U64

    @classmethod
    def of(cls, partition: str, batches: Sequence[RowColumns]) -> "_FileRows":
        none = np.zeros(0, np.int64)
        return cls(
            partition=partition,
            row_ids=[row_id for batch in batches for row_id in batch.row_ids],
            lines=np.concatenate([none, *(batch.lines for batch in batches)]),
            lengths=np.concatenate([none, *(np.diff(batch.offsets) for batch in batches)]),
            prompt_tokens=np.concatenate([none, *(batch.start for batch in batches)]),
            supervised=np.concatenate([none, *(batch.end - batch.start for batch in batches)]),
            flags=np.concatenate([none, *(batch.flags for batch in batches)]),
            finish_reasons=[reason for batch in batches for reason in batch.finish_reasons],
            dropped=[reason for batch in batches for reason in batch.dropped],
            text_hashes=np.concatenate(
                [none.astype(np.uint64), *(hash_rows(batch.ids, batch.offsets) for batch in batches)]
            ),
        )

    def example(self, index: int) -> RowExample:
        return RowExample(
            partition=self.partition,
            row_id=_printable(self.row_ids[index]),
            line=int(self.lines[index]),
            tokens=int(self.lengths[index]),
            supervised=int(self.supervised[index]),
            flags=int(self.flags[index]),
            dropped=self.dropped[index],
        )

    def flag_examples(self) -> dict[str, RowExample]:
        """Flag name -> first row with it."""
        found = ((flag, np.flatnonzero(self.flags & flag.value)) for flag in Flag)
        return {flag.name or "": self.example(int(where[0])) for flag, where in found if where.size}


def _printable(text: str) -> str:
    """Lone surrogates, which no JSON file can hold, as question marks."""
    return text.encode("utf8", "replace").decode()
