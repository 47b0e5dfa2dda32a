"""The statistics of many files as one, exactly: what those of one big file would be. Done by polars over 1,805 files.

polars is imported here and in the few other modules that work over many files, never where one file is tokenized: it
costs a process 32 MB and a quarter of a second.
"""

from collections.abc import Iterable, Sequence
from typing import Literal

import polars as pl

from dflash_core.statistics.duplicates import FILES_SHOWN, Duplicates, Repeat, unpack
from dflash_core.statistics.histogram import Histogram
from dflash_core.statistics.statistics import (
    WORST_ROWS,
    FileStatistics,
    MergedStatistics,
    add_counts,
    find_spike,
    first_of,
)


def merge_statistics(files: Iterable[FileStatistics]) -> MergedStatistics:
    """Add the statistics of all files up, exactly, whatever their order.

    Raises:
        ValueError: two of them are of the same partition.
    """
    ordered = sorted(files, key=lambda file: file.partition)
    if len({file.partition for file in ordered}) != len(ordered):
        raise ValueError("two statistics of the same partition cannot be merged")
    supervised = _sum_histograms(ordered, "supervised")
    worst = sorted((row for f in ordered for row in f.worst_rows), key=lambda row: row.supervised)
    return MergedStatistics(
        files=len(ordered),
        lines_read=sum(f.lines_read for f in ordered),
        rows_read=sum(f.rows_read for f in ordered),
        rows_rendered=sum(f.rows_rendered for f in ordered),
        rows_kept=sum(f.rows_kept for f in ordered),
        dropped=add_counts(f.dropped for f in ordered),
        rejected=add_counts(f.rejected for f in ordered),
        tokens=sum(f.tokens for f in ordered),
        supervised_tokens=sum(f.supervised_tokens for f in ordered),
        prompt_tokens=sum(f.prompt_tokens for f in ordered),
        supervised=supervised,
        lengths=_sum_histograms(ordered, "lengths"),
        finish_reasons=add_counts(f.finish_reasons for f in ordered),
        flag_sets=_sum_histograms(ordered, "flag_sets"),
        reject_examples=first_of(f.reject_examples for f in ordered),
        drop_examples=first_of(f.drop_examples for f in ordered),
        flag_examples=first_of(f.flag_examples for f in ordered),
        worst_rows=tuple(worst[:WORST_ROWS]),
        duplicates=duplicates_across(ordered),
        spike=find_spike(supervised, first_of(f.value_examples for f in ordered)),
    )


def duplicates_across(files: Sequence[FileStatistics]) -> Duplicates:
    """Exact over all files (sorted by partition) together, each row against all rows before it."""
    if not files:
        return Duplicates(ids=0, texts=0, conflicting_ids=0, by_file={}, repeats=())
    rows = pl.concat(
        pl.DataFrame({"line": unpack(f.lines), "id": unpack(f.id_hashes), "text": unpack(f.text_hashes)}).with_columns(
            pl.lit(i, pl.UInt32).alias("file")
        )
        for i, f in enumerate(files)
    )
    repeated = rows.filter(~pl.col("text").is_first_distinct())
    by_file = repeated.group_by("file").len("rows").sort("file")
    shown = by_file.sort("rows", descending=True, maintain_order=True).head(FILES_SHOWN)
    first = rows.unique("text", keep="first", maintain_order=True)
    examples = shown.join(repeated.unique("file", keep="first", maintain_order=True), on="file", maintain_order="left")
    places = examples.join(first, on="text", suffix="_first", maintain_order="left")
    distinct_ids = rows["id"].n_unique()
    pairs = rows.select("id", "text").n_unique() if distinct_ids < len(rows) else len(rows)
    return Duplicates(
        ids=len(rows) - distinct_ids,
        texts=len(repeated),
        conflicting_ids=pairs - distinct_ids,
        by_file={files[file].partition: count for file, count in by_file.iter_rows()},
        repeats=tuple(
            Repeat(
                partition=files[file].partition,
                line=line,
                first_partition=files[first_file].partition,
                first_line=first_line,
            )
            for file, line, first_file, first_line in places.select(
                "file", "line", "file_first", "line_first"
            ).iter_rows()
        ),
    )


def _sum_histograms(files: Sequence[FileStatistics], name: Literal["supervised", "lengths", "flag_sets"]) -> Histogram:
    histograms: list[Histogram] = [getattr(file, name) for file in files]
    rows = pl.DataFrame(
        {
            "value": [value for one in histograms for value in one],
            "rows": [count for one in histograms for count in one.values()],
        },
        schema={"value": pl.Int64, "rows": pl.Int64},
    )
    return dict(rows.group_by("value").sum().sort("value").iter_rows())
