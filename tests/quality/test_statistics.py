"""Merged statistics are those of one big file, every row is accounted for, and a spike is found with a row."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_core.quality.flags import TRUNCATED, Flag
from dflash_core.quality.hashes import hash_rows, pack, unpack
from dflash_core.quality.histogram import histogram, quantiles
from dflash_core.quality.spikes import MAX_WIDTH, MIN_ROWS, spike_window
from dflash_core.quality.statistics import (
    Counts,
    FileStatistics,
    MergedStatistics,
    RenderedRows,
    file_statistics,
    merge_statistics,
)
from dflash_core.records import Reject

REASONS = st.sampled_from(["too few supervised tokens", "longer than max_length"])
EXAMPLES = {"reject_examples", "drop_examples", "flag_examples", "worst_rows", "duplicates", "spike"}
"""Fields that name files and lines, which a concatenation numbers anew."""


@dataclass(frozen=True)
class Row:
    row_id: str
    text: int
    prompt: int
    supervised: int
    finish_reason: str | None
    flags: int
    dropped: str | None
    reject: str | None


ROWS = st.lists(
    st.builds(
        Row,
        row_id=st.sampled_from(["a", "b", "c", "ü", "\ud800"]),
        text=st.integers(0, 5),
        prompt=st.integers(0, 30),
        supervised=st.one_of(st.just(6), st.integers(0, 400)),
        finish_reason=st.sampled_from(["stop", "length", None]),
        flags=st.integers(0, (1 << len(Flag)) - 1),
        dropped=st.one_of(st.none(), REASONS),
        reject=st.one_of(st.none(), st.none(), st.sampled_from(["empty completion", "no JSON"])),
    ),
    max_size=60,
)


def _statistics(partition: str, lines: list[Row]) -> FileStatistics:
    rendered = [(i, line) for i, line in enumerate(lines, 1) if line.reject is None]
    rows = [row for _, row in rendered]
    columns = RenderedRows(
        row_ids=[row.row_id for row in rows],
        lines=np.array([i for i, _ in rendered], np.int64),
        lengths=np.array([row.prompt + row.supervised for row in rows], np.int64),
        prompt_tokens=np.array([row.prompt for row in rows], np.int64),
        supervised=np.array([row.supervised for row in rows], np.int64),
        finish_reasons=[row.finish_reason for row in rows],
        flags=np.array([row.flags for row in rows], np.int64),
        text_hashes=np.array([row.text for row in rows], np.uint64),
        dropped=[row.dropped for row in rows],
    )
    rejects = [Reject(line=i, reason=line.reject) for i, line in enumerate(lines, 1) if line.reject is not None]
    return file_statistics(partition, columns, rejects, len(lines))


def _numbers(counts: Counts) -> dict[str, object]:
    numbers = counts.model_dump(include=set(Counts.model_fields) - EXAMPLES)
    spike = counts.spike and (counts.spike.low, counts.spike.high, counts.spike.rows)
    duplicates = (counts.duplicates.ids, counts.duplicates.texts, counts.duplicates.conflicting_ids)
    worst = [row.supervised for row in counts.worst_rows]
    return {**numbers, "spike": spike, "duplicates": duplicates, "worst": worst}


@given(ROWS, st.lists(st.integers(0, 60), max_size=4))
def test_merged_statistics_are_those_of_the_concatenation(lines: list[Row], cuts: list[int]) -> None:
    bounds = [0, *sorted(min(cut, len(lines)) for cut in cuts), len(lines)]
    parts = [_statistics(f"file_{i}", lines[a:b]) for i, (a, b) in enumerate(pairwise(bounds))]
    merged = merge_statistics(parts)
    assert _numbers(merged) == _numbers(_statistics("whole", lines))
    assert merged == merge_statistics(parts[::-1])
    assert sum(merged.duplicates.by_file.values()) == merged.duplicates.texts


@given(ROWS)
def test_every_row_is_kept_dropped_or_rejected(lines: list[Row]) -> None:
    found = _statistics("file", lines)
    assert found.rows_read == len(lines) == found.rows_rendered + found.rows_rejected
    assert found.rows_rendered == found.rows_kept + sum(found.dropped.values())
    for counted in (found.supervised, found.lengths, found.finish_reasons, found.flag_sets):
        assert sum(counted.values()) == found.rows_rendered
    kept = [line for line in lines if line.reject is None and line.dropped is None]
    assert found.tokens == sum(line.prompt + line.supervised for line in kept)
    assert found.supervised_tokens == sum(line.supervised for line in kept)
    assert found.flagged(TRUNCATED) == sum(bool(line.flags & TRUNCATED) for line in lines if line.reject is None)


@given(ROWS)
def test_duplicates_equal_a_plain_count(lines: list[Row]) -> None:
    rows = [line for line in lines if line.reject is None]
    found = _statistics("file", lines).duplicates
    assert found.ids == len(rows) - len({row.row_id for row in rows})
    assert found.texts == len(rows) - len({row.text for row in rows})
    assert found.conflicting_ids == len({(row.row_id, row.text) for row in rows}) - len({row.row_id for row in rows})


@given(ROWS)
def test_statistics_survive_json(lines: list[Row]) -> None:
    found = _statistics("file", lines)
    assert FileStatistics.model_validate_json(found.model_dump_json()) == found
    merged = merge_statistics([found])
    assert MergedStatistics.model_validate_json(merged.model_dump_json()) == merged


def test_a_lost_line_is_an_error() -> None:
    rows = RenderedRows([], *[np.zeros(0, np.int64)] * 4, [], np.zeros(0, np.int64), np.zeros(0, np.uint64), [])
    with pytest.raises(ValueError, match="3 lines were read, but 1 are rendered or rejected"):
        file_statistics("file_07", rows, [Reject(line=2, reason="no JSON")], 3)


def test_columns_of_different_lengths_are_an_error() -> None:
    with pytest.raises(ValueError, match="columns of different lengths"):
        RenderedRows(["a"], *[np.zeros(0, np.int64)] * 4, [], np.zeros(0, np.int64), np.zeros(0, np.uint64), [])


def test_two_statistics_of_one_partition_are_not_merged() -> None:
    with pytest.raises(ValueError, match="same partition"):
        merge_statistics([_statistics("file", []), _statistics("file", [])])


def test_no_rows_at_all_are_counted_as_such() -> None:
    merged = merge_statistics([_statistics("empty", [])])
    assert (merged.rows_read, merged.spike, merged.worst_rows, quantiles(merged.supervised)) == (0, None, (), {})


@given(st.integers(50, 400), st.integers(0, 1000), st.integers(0, 3000), st.floats(0.1, 0.99))
def test_a_spike_is_found_where_it_was_planted(size: int, seed: int, value: int, share: float) -> None:
    spread = np.random.default_rng(seed).integers(0, 3000, size)
    noise = spread[abs(spread - value) > MAX_WIDTH * 2].tolist()
    planted = max(MIN_ROWS, int(share / (1 - share) * len(noise)) + 1)
    rows = [Row(f"q-{i}", i, 5, n, "stop", 0, None, None) for i, n in enumerate([*noise, *[value] * planted])]
    spike = _statistics("file", rows).spike
    assert spike is not None
    assert spike.example is not None
    assert (spike.low, spike.high, spike.rows) == (value, value, planted)
    assert (spike.example.supervised, spike.example.line) == (value, len(noise) + 1)


def test_the_merged_spike_has_an_example_though_it_is_no_files_own_mode() -> None:
    def part(k: int) -> FileStatistics:
        values = [100 * (k + 1)] * 40 + [6] * 35 + list(range(1000, 1025))
        return _statistics(f"file_{k}", [Row(f"{k}-{i}", i, 5, v, "stop", 0, None, None) for i, v in enumerate(values)])

    spike = merge_statistics([part(k) for k in range(5)]).spike
    assert spike is not None
    assert spike.example is not None
    assert (spike.low, spike.rows, spike.example.row_id) == (6, 175, "0-40")


@given(st.lists(st.integers(0, 50), min_size=1))
def test_quantiles_are_exact(values: list[int]) -> None:
    array = np.array(values)
    found = quantiles(histogram(array))
    for name, share in (("p10", 0.1), ("median", 0.5), ("p99", 0.99)):
        assert found[name] == np.quantile(array, share, method="inverted_cdf")
    assert (found["min"], found["max"]) == (min(values), max(values))


@pytest.mark.parametrize("deviation", [6, 40, 700])
@pytest.mark.parametrize("rows", [250, 500, 100_000])
def test_healthy_answers_have_no_spike(deviation: int, rows: int) -> None:
    for seed in range(20):
        values = np.random.default_rng(seed).normal(4 * deviation, deviation, rows).clip(1)
        assert spike_window(histogram(values.astype(np.int64))) is None


def test_a_small_spike_beside_a_narrow_mode_is_found() -> None:
    values = np.random.default_rng(0).normal(90, 9, 1782).astype(np.int64)
    assert spike_window(histogram(np.concatenate([values, np.full(218, 6)]))) == (6, 6, 218)


def test_a_spike_within_the_bulk_is_named_exactly() -> None:
    values = np.random.default_rng(0).normal(90, 20, 800).astype(np.int64)
    found = spike_window(histogram(np.concatenate([values, np.full(400, 85)])))
    assert found == (85, 85, 400 + int((values == 85).sum()))


def test_a_spike_may_be_a_few_values_wide() -> None:
    values = np.concatenate([np.arange(100, 900, 4), 5 + np.arange(90) % 3])
    assert spike_window(histogram(values)) == (5, 7, 90)


@given(st.lists(st.lists(st.integers(0, 3), max_size=4), max_size=12))
def test_hashes_are_equal_exactly_where_rows_are(rows: list[list[int]]) -> None:
    flat = np.array([token for row in rows for token in row], np.uint32)
    hashes = hash_rows(flat, np.cumsum([0, *map(len, rows)]))
    assert len(set(hashes.tolist())) == len(set(map(tuple, rows)))
    assert unpack(pack(hashes)).tolist() == hashes.tolist()
