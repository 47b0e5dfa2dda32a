"""Pictures are real, small and drawn for any data; the report is one file with every text escaped."""

import re
from collections.abc import Callable
from xml.etree import ElementTree

import pytest

from dflash_core.quality.file_picture import file_picture
from dflash_core.quality.flags import Flag
from dflash_core.quality.gate import judge
from dflash_core.quality.histogram import equal_bins
from dflash_core.quality.plots import merged_plot
from dflash_core.quality.report import training_set_report
from dflash_core.quality.statistics import FileStatistics, merge_statistics
from dflash_core.recipe import Gate
from dflash_core.records import StoredObject, TrainingSet

Make = Callable[..., FileStatistics]
GOOD = [40 + 3 * i for i in range(100)]
SVG = "{http://www.w3.org/2000/svg}"
EVIL = '<script>alert("x")</script>'


@pytest.fixture
def files(make_file: Make, row: Make) -> list[FileStatistics]:
    lossy = [row(s, flags=int(Flag.TRUNCATED_BY_LENGTH | Flag.THOUGHT), finish_reason=EVIL) for s in GOOD]
    return [
        make_file("good", [row(s) for s in GOOD]),
        make_file("spiky", [row(6, dropped="too few supervised tokens", row_id=EVIL)] * 90 + [row(s) for s in GOOD]),
        make_file("lossy $x^$", lossy, [EVIL, "a reason " * 20, *(f"reason {i}" for i in range(12))]),
        make_file("empty", []),
        make_file("one", [row(0)]),
        make_file("huge", [row(1_000_000), row(3)]),
    ]


def test_every_file_has_a_small_picture_that_is_valid_whatever_its_texts(files: list[FileStatistics]) -> None:
    for file in files:
        picture = file_picture(file)
        texts = [element.text for element in ElementTree.fromstring(picture).iter(f"{SVG}text")]
        assert "Supervised tokens per row" in texts
        assert len(picture) <= 8_000, file.partition


def test_the_picture_names_the_spike_and_what_was_lost(files: list[FileStatistics]) -> None:
    _, spiky, lossy, *_ = (file_picture(file).decode() for file in files)
    assert "47.4 % of all rows have 6 tokens" in spiky
    assert "too few sup" in spiky
    assert "more</text>" in lossy


def test_bins_hold_every_row() -> None:
    counts = {3: 5, 6: 90, 7: 2, 900: 1, 1_000_000: 1}
    bins = equal_bins(counts, 48, (6, 7))
    assert (bins.inside.sum(), bins.outside.sum()) == (92, 7)
    assert bins.inside[bins.edges[:-1].searchsorted(6, side="right") - 1] > 0
    assert bins.highest == 1_000_000


def test_the_merged_picture_is_drawn_with_and_without_rows(files: list[FileStatistics]) -> None:
    for some in (files, files[3:4], []):
        assert merged_plot(merge_statistics(some), some).startswith(b"\x89PNG")


def frozen_of(files: list[FileStatistics]) -> TrainingSet:
    merged = merge_statistics(files)
    return TrainingSet(
        hash="0123",
        recipe=EVIL,
        fingerprint=EVIL,
        shards=(),
        missing=(EVIL,),
        coverage=0.5,
        rows_read=merged.rows_read,
        rows_kept=merged.rows_kept,
        rows_rejected=merged.rows_read - merged.rows_kept,
        reject_reasons={},
        tokens=merged.tokens,
        supervised_tokens=merged.supervised_tokens,
        statistics=StoredObject(key="", size=0, sha256=""),
        verdict=judge(Gate(), merged, files, 7, [EVIL]),
    )


def test_the_report_needs_nothing_else_and_escapes_everything(files: list[FileStatistics]) -> None:
    merged = merge_statistics(files)
    page = training_set_report(frozen_of(files), merged, files, merged_plot(merged, files))
    assert EVIL not in page
    assert "<script" not in page
    assert not re.findall(r'(?:src|href)="(?!data:)', page)
    for reason in ("gate failed", "spike at 6 tokens", "too few supervised tokens", "lossy $x^$"):
        assert reason in page
    assert (page.count("data:image/png"), page.count("data:image/svg+xml")) == (1, 3)


def test_the_report_shows_how_thoughts_were_spelt_and_how_often_engine_ids_drifted(make_file: Make, row: Make) -> None:
    drift, inline = Flag.ENGINE_IDS | Flag.DRIFT, Flag.THOUGHT | Flag.THOUGHT_INLINE
    flags = [drift] * 9 + [Flag.ENGINE_IDS] * 21 + [inline] * 20 + [Flag.THOUGHT | Flag.THOUGHT_IN_REASONING] * 50
    files = [make_file("mixed", [row(40 + 3 * i, flags=int(flag)) for i, flag in enumerate(flags)])]
    merged = merge_statistics(files)
    page = training_set_report(frozen_of(files), merged, files, merged_plot(merged, files))
    shown = " ".join(re.sub("<[^>]+>", " ", page).split())
    assert "text re-tokenizes to other ids, of rows with engine ids 9 30.0 %" in shown
    assert " thought 70 70.0 % mixed, line 31 " in shown
    assert " thought inline 20 20.0 % mixed, line 31 " in shown
    assert " thought in reasoning 50 50.0 % mixed, line 51 " in shown
