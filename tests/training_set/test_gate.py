"""The gate fails for what makes a training set bad, says it with file, row and numbers, and cannot be talked round."""

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_core.recipe import GateSettings
from dflash_core.records import Verdict
from dflash_core.statistics.merge import merge_statistics
from dflash_core.statistics.statistics import FileStatistics
from dflash_core.tokenization.flags import Flag
from dflash_core.training_set.gate import judge

Make = Callable[..., FileStatistics]
DEFAULTS = GateSettings()
GOOD = [40 + 3 * i for i in range(250)]


def _judge(files: Sequence[FileStatistics], gate: GateSettings = DEFAULTS, missing: Sequence[str] = ()) -> Verdict:
    return judge(gate, merge_statistics(files), files, len(files) + len(missing), missing)


def test_good_files_pass(make_file: Make, row: Make) -> None:
    verdict = _judge([make_file(f"file_{k}", [row(s) for s in GOOD]) for k in range(8)])
    assert verdict == Verdict(passed=True, reasons=())


def test_one_file_of_empty_completions_is_named_with_its_spike_and_a_row(make_file: Make, row: Make) -> None:
    files = [make_file(f"file_0{k}", [row(s) for s in GOOD]) for k in range(8)]
    bad = [row(s) for s in GOOD[:17]] + [row(6, row_id=f"q-{i}") for i in range(17, 235)] + [row(400)] * 15
    files[3] = make_file("file_03", bad)
    assert _judge(files).reasons == (
        "all files: 218 of 2,000 rows (10.9 %) have at most 16 supervised tokens, limit 2.0 %; "
        "spike at 6 tokens (218 rows), e.g. row q-17 (line 18 of file_03); most in file_03 (218)",
        "file_03: 218 of 250 rows (87.2 %) have at most 16 supervised tokens, limit 10.0 %; "
        "spike at 6 tokens (218 rows), e.g. row q-17 (line 18)",
    )


def test_one_bad_file_among_many_fails_though_the_whole_is_fine(make_file: Make, row: Make) -> None:
    files = [make_file(f"file_{k:03}", [row(s) for s in GOOD]) for k in range(60)]
    files[41] = make_file("file_041", [row(s) for s in GOOD[:150]] + [row(6)] * 100)
    (reason,) = _judge(files).reasons
    assert reason.startswith("file_041: 100 of 250 rows (40.0 %) have at most 16 supervised tokens, limit 10.0 %")


def test_a_spike_above_near_empty_fails(make_file: Make, row: Make) -> None:
    refusals = make_file("file_1", [row(s) for s in GOOD[:100]] + [row(38)] * 150)
    reasons = _judge([make_file("file_0", [row(s) for s in GOOD]), refusals], GateSettings(file_factor=1)).reasons
    assert len(reasons) == 1
    assert "spike at 38 tokens (150 rows), e.g. row file_1-100 (line 101)" in reasons[0]


def test_rejects_truncation_and_duplicates_are_named_by_file(make_file: Make, row: Make) -> None:
    files = [make_file(f"file_{k}", [row(s) for s in GOOD]) for k in range(3)]
    files.append(make_file("rejecting", [row(s) for s in GOOD], ["empty completion"] * 60 + ["no JSON"] * 5))
    files.append(make_file("truncated", [row(s, flags=int(Flag.TRUNCATED_BY_LENGTH)) for s in GOOD]))
    files.append(make_file("twice", [row(s, text=f"file_2 text {i}") for i, s in enumerate(GOOD)]))
    assert _judge(files).reasons == (
        "all files: 250 of 1,500 rows (16.7 %) were ended by the engine's token limit, limit 10.0 %; "
        "e.g. row truncated-0 (line 1 of truncated); most in truncated (250)",
        "truncated: 250 of 250 rows (100.0 %) were ended by the engine's token limit, limit 50.0 %; "
        "e.g. row truncated-0 (line 1)",
        'all files: 65 of 1,565 rows (4.2 %) were rejected, limit 2.0 %; most often "empty completion" (60), '
        "e.g. line 251 of rejecting; most in rejecting (65)",
        'rejecting: 65 of 315 rows (20.6 %) were rejected, limit 10.0 %; most often "empty completion" (60), '
        "e.g. line 251",
        "all files: 250 of 1,500 rows (16.7 %) repeat the text of another row, limit 5.0 %; "
        "e.g. line 1 of twice repeats line 1 of file_2; most in twice (250)",
        "twice: 250 of 250 rows (100.0 %) repeat the text of another row, limit 25.0 %; "
        "e.g. line 1 of twice repeats line 1 of file_2",
    )


def test_missing_and_hollow_files_count_against_coverage(make_file: Make, row: Make) -> None:
    files = [make_file(f"file_{k}", [row(s) for s in GOOD]) for k in range(8)]
    hollow = [make_file("zero", []), make_file("rejects_only", [], ["no JSON"] * 3)]
    assert _judge([*files, *hollow], GateSettings(max_rejected_share=1), ["lost"]).reasons == (
        "8 of 11 files (72.7 %) can be trained on, at least 95.0 % wanted; without a valid shard: lost; "
        "without a single row to train on: zero (no rows), rejects_only (3 of 3 rows: no JSON)",
    )


def test_nothing_at_all_fails() -> None:
    assert not _judge([], missing=["file_0"]).passed
    assert not _judge([]).passed


def test_zero_rows_surviving_fails_with_the_top_reason(make_file: Make, row: Make) -> None:
    dropped = [row(s, dropped="longer than max_length") for s in GOOD]
    (first, *_) = _judge([make_file("file_0", dropped)], GateSettings(min_coverage=0)).reasons
    assert "file_0 (250 of 250 rows: longer than max_length)" in first


def test_a_low_median_fails(make_file: Make, row: Make) -> None:
    files = [
        make_file("short", [row(17 + i % 14) for i in range(200)]),
        make_file("long", [row(s) for s in GOOD[:100]]),
    ]
    (reason,) = _judge(files).reasons
    assert reason.startswith(
        "all files: the median row has 27 supervised tokens, at least 32 wanted; lowest in short (23)"
    )


def test_many_bad_files_are_counted_not_listed(make_file: Make, row: Make) -> None:
    files = [make_file(f"file_{k:02}", [row(6)] * 30) for k in range(30)]
    reasons = _judge(files).reasons
    assert "20 more files in which too many rows have at most 16 supervised tokens" in reasons
    assert len(reasons) < 20


SUPERVISED = st.lists(st.one_of(st.integers(0, 40), st.integers(0, 900)), min_size=1, max_size=60)


@given(st.lists(st.tuples(SUPERVISED, st.integers(0, 60)), min_size=1, max_size=4), st.sampled_from([0.0, 0.02, 0.4]))
def test_dropping_rows_never_makes_the_gate_pass(
    make_file: Make, row: Make, contents: list[tuple[list[int], int]], limit: float
) -> None:
    gate = GateSettings(max_near_empty_share=limit, max_spike_share=1, max_dropped_share=1)
    whole = [make_file(f"file_{k}", [row(s) for s in rows]) for k, (rows, _) in enumerate(contents)]
    fewer = [
        make_file(f"file_{k}", [row(s, dropped="too few supervised tokens" if s < least else None) for s in rows])
        for k, (rows, least) in enumerate(contents)
    ]
    if not _judge(whole, gate).passed:
        assert not _judge(fewer, gate).passed


@given(SUPERVISED, st.floats(0, 1))
def test_the_verdict_is_the_plain_comparison(make_file: Make, row: Make, supervised: list[int], limit: float) -> None:
    gate = GateSettings(max_near_empty_share=limit, max_spike_share=1, min_median_supervised_tokens=0, file_factor=1)
    near_empty = sum(s <= 16 for s in supervised)
    assert _judge([make_file("file", [row(s) for s in supervised])], gate).passed == (
        near_empty <= limit * len(supervised)
    )


@pytest.mark.parametrize("factor", [1, 5, 100])
def test_a_share_of_one_is_never_exceeded(make_file: Make, row: Make, factor: float) -> None:
    gate = GateSettings(max_near_empty_share=1, min_median_supervised_tokens=0, file_factor=factor)
    assert _judge([make_file("file", [row(6)] * 50)], gate).passed
