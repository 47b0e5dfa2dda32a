"""Every row is accounted for, and a spike is found with a row to look at."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_core.records import Reject
from dflash_core.statistics.histogram import MIN_ROWS, SPIKE_WIDTH
from dflash_core.statistics.statistics import FileStatistics, file_statistics
from dflash_core.tokenization.flags import TRUNCATED
from tests.statistics.rows import ROWS, Row, file_of


@given(ROWS)
def test_every_row_is_kept_dropped_or_rejected(lines: list[Row]) -> None:
    found = file_of("file", lines)
    assert found.rows_read == len(lines) == found.rows_rendered + found.rows_rejected
    assert found.rows_rendered == found.rows_kept + found.rows_dropped
    assert (found.rows_dropped, found.rows_rejected) == (sum(found.dropped.values()), sum(found.rejected.values()))
    for counted in (found.supervised, found.lengths, found.finish_reasons, found.flag_sets):
        assert sum(counted.values()) == found.rows_rendered
    kept = [line for line in lines if line.reject is None and line.dropped is None]
    assert found.tokens == sum(line.prompt + line.supervised for line in kept)
    assert found.supervised_tokens == sum(line.supervised for line in kept)
    assert found.flagged(TRUNCATED) == sum(bool(line.flags & TRUNCATED) for line in lines if line.reject is None)


@given(ROWS)
def test_statistics_survive_json(lines: list[Row]) -> None:
    found = file_of("file", lines)
    assert FileStatistics.model_validate_json(found.model_dump_json()) == found


def test_a_lost_line_is_an_error() -> None:
    with pytest.raises(ValueError, match="3 lines were read, but 1 are rendered or rejected"):
        file_statistics("file_07", [], [Reject(line=2, reason="no JSON")], 3)


@given(st.integers(50, 400), st.integers(0, 1000), st.integers(0, 3000), st.floats(0.1, 0.99))
def test_a_spike_is_found_where_it_was_planted(size: int, seed: int, value: int, share: float) -> None:
    spread = np.random.default_rng(seed).integers(0, 3000, size)
    noise = spread[abs(spread - value) > SPIKE_WIDTH * 2].tolist()
    planted = max(MIN_ROWS, int(share / (1 - share) * len(noise)) + 1)
    rows = [Row(n, f"q-{i}", str(i), prompt=5) for i, n in enumerate([*noise, *[value] * planted])]
    spike = file_of("file", rows).spike
    assert spike is not None
    assert spike.example is not None
    assert (spike.low, spike.high, spike.rows) == (value, value, planted)
    assert (spike.example.supervised, spike.example.line) == (value, len(noise) + 1)
