"""Merged statistics are those of one big file."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_core.statistics.histogram import quantiles
from dflash_core.statistics.merge import merge_statistics
from dflash_core.statistics.statistics import Counts, FileStatistics, MergedStatistics
from tests.statistics.rows import ROWS, Row, file_of

EXAMPLES = {"reject_examples", "drop_examples", "flag_examples", "worst_rows", "duplicates", "spike"}
"""Fields that name files and lines, which a concatenation numbers in its own way."""


def _numbers(counts: Counts) -> dict[str, object]:
    numbers = counts.model_dump(include=set(Counts.model_fields) - EXAMPLES)
    spike = counts.spike and (counts.spike.low, counts.spike.high, counts.spike.rows)
    duplicates = (counts.duplicates.ids, counts.duplicates.texts, counts.duplicates.conflicting_ids)
    worst = [row.supervised for row in counts.worst_rows]
    return {**numbers, "spike": spike, "duplicates": duplicates, "worst": worst}


@given(ROWS, st.lists(st.integers(0, 60), max_size=4))
def test_merged_statistics_are_those_of_the_concatenation(lines: list[Row], cuts: list[int]) -> None:
    bounds = [0, *sorted(min(cut, len(lines)) for cut in cuts), len(lines)]
    parts = [file_of(f"file_{i}", lines[a:b]) for i, (a, b) in enumerate(pairwise(bounds))]
    merged = merge_statistics(parts)
    assert _numbers(merged) == _numbers(file_of("whole", lines))
    assert merged == merge_statistics(parts[::-1])
    assert sum(merged.duplicates.by_file.values()) == merged.duplicates.texts


@given(ROWS)
def test_merged_statistics_survive_json(lines: list[Row]) -> None:
    merged = merge_statistics([file_of("file", lines)])
    assert MergedStatistics.model_validate_json(merged.model_dump_json()) == merged


def test_two_statistics_of_one_partition_are_not_merged() -> None:
    with pytest.raises(ValueError, match="same partition"):
        merge_statistics([file_of("file", []), file_of("file", [])])


def test_no_rows_at_all_are_counted_as_such() -> None:
    merged = merge_statistics([file_of("empty", [])])
    assert (merged.rows_read, merged.spike, merged.worst_rows, quantiles(merged.supervised)) == (0, None, (), {})


def test_the_merged_spike_has_an_example_though_it_is_no_files_own_mode() -> None:
    def part(k: int) -> FileStatistics:
        values = [100 * (k + 1)] * 40 + [6] * 35 + list(range(1000, 1025))
        return file_of(f"file_{k}", [Row(v, f"{k}-{i}", str(i), prompt=5) for i, v in enumerate(values)])

    spike = merge_statistics([part(k) for k in range(5)]).spike
    assert spike is not None
    assert spike.example is not None
    assert (spike.low, spike.rows, spike.example.row_id) == (6, 175, "0-40")
