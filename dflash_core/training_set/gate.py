"""The gate between data and training: thresholds of the recipe against exact counts, over all files and in each one.

A reason is a sentence with file, numbers, limit and a row to look at. Shares count every rendered row, also those
dropped afterwards, so that no policy can hide bad completions; a single file may have `file_factor` times each share.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dflash_core.recipe import GateSettings
from dflash_core.records import Verdict
from dflash_core.reports.sentences import percent
from dflash_core.statistics.histogram import at_most, quantiles
from dflash_core.statistics.statistics import Counts, FileStatistics, MergedStatistics, RowExample
from dflash_core.tokenization.flags import TRUNCATED, Flag

FILES_NAMED = 10
"""Worst files named per threshold; the rest is counted (the report lists them)."""

Count = Callable[[Counts], int]


@dataclass(frozen=True)
class Threshold:
    """One share with its limit."""

    what: str
    """Goes on after "218 of 250 rows (87.2 %)"."""
    limit: float
    bad: Count
    total: Count
    detail: Callable[[Counts], str]

    def exceeded(self, counts: Counts, factor: float = 1.0) -> bool:
        """Whether the share is above `factor` times the limit."""
        return self.bad(counts) > min(1.0, self.limit * factor) * self.total(counts)

    def sentence(self, name: str, counts: Counts, factor: float = 1.0) -> str:
        """The reason, for all files or one."""
        bad, total = self.bad(counts), self.total(counts)
        detail = self.detail(counts)
        return (
            f"{name}: {bad:,} of {total:,} rows ({percent(bad / total)}) {self.what}, "
            f"limit {percent(min(1.0, self.limit * factor))}{'; ' if detail else ''}{detail}"
        )


def judge(
    gate: GateSettings,
    merged: MergedStatistics,
    files: Sequence[FileStatistics],
    expected_files: int,
    missing: Sequence[str],
) -> Verdict:
    """Hold the statistics against the recipe's thresholds.

    Args:
        gate: the thresholds.
        merged: statistics of all files together.
        files: those of each file.
        expected_files: files the training set should have.
        missing: partitions among them without a valid shard.
    """
    reasons = _coverage(gate, files, expected_files, missing)
    for threshold in thresholds(gate, merged):
        over = [file for file in files if threshold.exceeded(file, gate.file_factor)]
        over.sort(key=lambda file: (-threshold.bad(file) / threshold.total(file), file.partition))
        if threshold.exceeded(merged):
            most = sorted((f for f in files if threshold.bad(f)), key=lambda f: (-threshold.bad(f), f.partition))[:3]
            where = ", ".join(f"{file.partition} ({threshold.bad(file):,})" for file in most)
            reasons.append(f"{threshold.sentence('all files', merged)}; most in {where}")
        reasons += [threshold.sentence(file.partition, file, gate.file_factor) for file in over[:FILES_NAMED]]
        if len(over) > FILES_NAMED:
            reasons.append(f"{len(over) - FILES_NAMED} more files in which too many rows {threshold.what}")
    reasons += _median(gate, merged, files)
    return Verdict(passed=not reasons, reasons=tuple(reasons))


def thresholds(gate: GateSettings, merged: MergedStatistics) -> tuple[Threshold, ...]:
    """All shares the gate looks at; what a file has in duplicates depends on the others, hence `merged`."""
    near = gate.near_empty_tokens

    def near_empty(counts: Counts) -> int:
        return at_most(counts.supervised, near)

    def spike(counts: Counts) -> int:
        """Rows in the spike, unless they are near-empty and counted as such."""
        return counts.spike.rows if counts.spike and counts.spike.high > near else 0

    def duplicates(counts: Counts) -> int:
        if isinstance(counts, FileStatistics):
            return merged.duplicates.by_file.get(counts.partition, 0)
        return counts.duplicates.texts

    return (
        Threshold(
            f"have at most {near} supervised tokens",
            gate.max_near_empty_share,
            near_empty,
            rendered,
            lambda counts: _most_frequent(counts, near),
        ),
        Threshold(
            "have almost the same number of supervised tokens", gate.max_spike_share, spike, rendered, spike_text
        ),
        Threshold(
            "were ended by the engine's token limit",
            gate.max_truncated_share,
            lambda counts: counts.flagged(TRUNCATED),
            rendered,
            lambda counts: _flag_example(counts, TRUNCATED),
        ),
        Threshold(
            "were rejected",
            gate.max_rejected_share,
            lambda counts: counts.rows_rejected,
            lambda counts: counts.rows_read,
            _top_reject,
        ),
        Threshold(
            "were dropped after rendering",
            gate.max_dropped_share,
            lambda counts: counts.rows_dropped,
            rendered,
            _top_drop,
        ),
        Threshold(
            "repeat the text of another row",
            gate.max_duplicate_share,
            duplicates,
            rendered,
            lambda counts: _repeat(counts, merged),
        ),
    )


def rendered(counts: Counts) -> int:
    """The denominator of most shares."""
    return counts.rows_rendered


def spike_text(counts: Counts) -> str:
    """`spike at 6 tokens (218 rows), e.g. row q-17 (line 18)`, or nothing."""
    spike = counts.spike
    if spike is None:
        return ""
    return f"spike at {spike.place} tokens ({spike.rows:,} rows){_eg(counts, spike.example)}"


def _coverage(
    gate: GateSettings, files: Sequence[FileStatistics], expected_files: int, missing: Sequence[str]
) -> list[str]:
    """Files without a shard, or with one that holds nothing, count as not there."""
    hollow = [file for file in files if not file.rows_kept]
    present = len(files) - len(hollow)
    if present >= gate.min_coverage * expected_files and present:
        return []
    share = present / expected_files if expected_files else 0.0
    parts = []
    if missing:
        parts.append(f"without a valid shard: {_names(missing)}")
    if hollow:
        parts.append(f"without a single row to train on: {_names([_hollow(file) for file in hollow])}")
    return [
        f"{present:,} of {expected_files:,} files ({percent(share)}) can be trained on, "
        f"at least {percent(gate.min_coverage)} wanted; {'; '.join(parts)}"
    ]


def _hollow(file: FileStatistics) -> str:
    if not file.rows_read:
        return f"{file.partition} (no rows)"
    lost = {**file.rejected, **file.dropped}
    reason, rows = max(lost.items(), key=lambda item: item[1])
    return f"{file.partition} ({rows:,} of {file.rows_read:,} rows: {reason})"


def _median(gate: GateSettings, merged: MergedStatistics, files: Sequence[FileStatistics]) -> list[str]:
    median = quantiles(merged.supervised).get("median")
    if median is None or median >= gate.min_median_supervised_tokens:
        return []
    lowest = sorted((quantiles(f.supervised)["median"], f.partition) for f in files if f.supervised)[:3]
    return [
        f"all files: the median row has {median:,} supervised tokens, at least {gate.min_median_supervised_tokens:,} "
        f"wanted; lowest in {', '.join(f'{name} ({value:,})' for value, name in lowest)}"
    ]


def _most_frequent(counts: Counts, limit: int) -> str:
    """The near-empty value with the most rows, with one of them."""
    value = max((v for v in counts.supervised if v <= limit), key=lambda v: counts.supervised[v])
    known = counts.value_examples if isinstance(counts, FileStatistics) else {}
    spare = {row.supervised: row for row in reversed(counts.worst_rows)}
    example = known.get(value) or spare.get(value) or counts.worst_rows[0]
    return f"spike at {value} tokens ({counts.supervised[value]:,} rows){_eg(counts, example)}"


def _flag_example(counts: Counts, flags: Flag) -> str:
    found = (counts.flag_examples[flag.name or ""] for flag in flags if flag.name in counts.flag_examples)
    return _eg(counts, next(found, None)).removeprefix(", ")


def _top_reject(counts: Counts) -> str:
    if not counts.rejected:
        return ""
    reason, rows = next(iter(counts.rejected.items()))
    example = counts.reject_examples[reason]
    place = "" if isinstance(counts, FileStatistics) else f" of {example.partition}"
    return f'most often "{reason}" ({rows:,}), e.g. line {example.line}{place}'


def _top_drop(counts: Counts) -> str:
    if not counts.dropped:
        return ""
    reason, rows = next(iter(counts.dropped.items()))
    return f'most often "{reason}" ({rows:,}){_eg(counts, counts.drop_examples[reason])}'


def _repeat(counts: Counts, merged: MergedStatistics) -> str:
    name = counts.partition if isinstance(counts, FileStatistics) else None
    known = [*merged.duplicates.repeats, *counts.duplicates.repeats]
    repeat = next((r for r in known if name in (None, r.partition)), None)
    if repeat is None:
        return ""
    return f"e.g. line {repeat.line} of {repeat.partition} repeats line {repeat.first_line} of {repeat.first_partition}"


def _eg(counts: Counts, example: RowExample | None) -> str:
    if example is None:
        return ""
    place = "" if isinstance(counts, FileStatistics) else f" of {example.partition}"
    return f", e.g. row {example.row_id} (line {example.line}{place})"


def _names(names: Sequence[str]) -> str:
    more = f" and {len(names) - FILES_NAMED:,} more" if len(names) > FILES_NAMED else ""
    return ", ".join(names[:FILES_NAMED]) + more
