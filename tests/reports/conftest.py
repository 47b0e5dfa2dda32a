"""Files of every kind: good, with a spike, with losses of hostile names, empty, and with rows beyond any plot."""

import pytest

from dflash_core.statistics.statistics import FileStatistics
from dflash_core.tokenization.flags import Flag
from tests.statistics.conftest import MakeFile, make_file, row
from tests.statistics.rows import Row

__all__ = ["make_file", "row"]
GOOD = [40 + 3 * i for i in range(100)]
EVIL = '<script>alert("x")</script>'


@pytest.fixture
def files(make_file: MakeFile, row: type[Row]) -> list[FileStatistics]:
    lossy = [row(s, flags=int(Flag.TRUNCATED_BY_LENGTH | Flag.THOUGHT), finish_reason=EVIL) for s in GOOD]
    return [
        make_file("good", [row(s) for s in GOOD]),
        make_file("spiky", [row(6, dropped="too few supervised tokens", row_id=EVIL)] * 90 + [row(s) for s in GOOD]),
        make_file("lossy $x^$", lossy, [EVIL, "a reason " * 20, *(f"reason {i}" for i in range(12))]),
        make_file("empty", []),
        make_file("one", [row(0)]),
        make_file("huge", [row(1_000_000), row(3)]),
    ]
