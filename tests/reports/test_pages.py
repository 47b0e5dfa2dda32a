"""A page is one file with everything in it and every text escaped."""

import re
from html import unescape

from dflash_core.recipe import GateSettings
from dflash_core.records import StoredObject, TrainingSet
from dflash_core.reports.file_picture import file_picture
from dflash_core.reports.pages import FILES_PICTURED, code, row_page, training_set_page, worst_files
from dflash_core.reports.plots import training_set_picture
from dflash_core.statistics.merge import merge_statistics
from dflash_core.statistics.statistics import FileStatistics
from dflash_core.tokenization.flags import Flag
from dflash_core.training_set.gate import judge
from tests.reports.conftest import EVIL
from tests.shards.inspected import hostile_row
from tests.statistics.conftest import MakeFile
from tests.statistics.rows import Row


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
        rows_dropped=merged.rows_dropped,
        rows_rejected=merged.rows_rejected,
        drop_reasons=merged.dropped,
        reject_reasons=merged.rejected,
        tokens=merged.tokens,
        supervised_tokens=merged.supervised_tokens,
        statistics=StoredObject(key="", size=0, sha256=""),
        verdict=judge(GateSettings(), merged, files, 7, [EVIL]),
    )


def page_of(files: list[FileStatistics], **changes: object) -> str:
    merged, worst = merge_statistics(files), worst_files(files)[:FILES_PICTURED]
    frozen = frozen_of(files).model_copy(update=changes)
    pictures = {file.partition: file_picture(file) for file in worst}
    return training_set_page(frozen, merged, files, training_set_picture(merged, files), pictures)


def text_of(page: str) -> str:
    """What a reader sees."""
    return " ".join(unescape(re.sub("<[^>]+>", " ", page)).split())


def test_the_report_needs_nothing_else_and_escapes_everything(files: list[FileStatistics]) -> None:
    page = page_of(files)
    assert EVIL not in page
    assert "<script" not in page
    assert not re.findall(r'(?:src|href)="(?!data:)', page)
    for reason in ("gate failed", "spike at 6 tokens", "too few supervised tokens", "lossy $x^$"):
        assert reason in page
    assert (page.count("data:image/png"), page.count("data:image/svg+xml")) == (1, 3)


def test_the_report_shows_how_thoughts_were_spelt_and_how_often_engine_ids_drifted(
    make_file: MakeFile, row: type[Row]
) -> None:
    drift, inline = Flag.ENGINE_IDS | Flag.DRIFT, Flag.THOUGHT | Flag.THOUGHT_INLINE
    flags = [drift] * 9 + [Flag.ENGINE_IDS] * 21 + [inline] * 20 + [Flag.THOUGHT | Flag.THOUGHT_IN_REASONING] * 50
    files = [make_file("mixed", [row(40 + 3 * i, flags=int(flag)) for i, flag in enumerate(flags)])]
    shown = text_of(page_of(files))
    assert "text re-tokenizes to other ids, of rows with engine ids 9 30.0 %" in shown
    assert " thought 70 70.0 % mixed, line 31 " in shown
    assert " thought inline 20 20.0 % mixed, line 31 " in shown
    assert " thought in reasoning 50 50.0 % mixed, line 51 " in shown


def test_the_page_counts_kept_dropped_and_rejected_rows_apart(files: list[FileStatistics]) -> None:
    merged = merge_statistics(files)
    shown = text_of(page_of(files))
    assert merged.rows_read == merged.rows_kept + merged.rows_dropped + merged.rows_rejected
    for rows, what in (
        (merged.rows_read, "read"),
        (merged.rows_kept, "kept"),
        (merged.rows_dropped, "dropped"),
        (merged.rows_rejected, "rejected"),
    ):
        assert f" {rows:,} rows {what} " in shown
    assert " dropped: too few supervised tokens 90 " in shown
    assert " rejected: reason 3 1 " in shown


def test_a_set_from_before_dropped_rows_were_counted_apart_says_nothing_of_them(files: list[FileStatistics]) -> None:
    shown = text_of(page_of(files, rows_dropped=None, drop_reasons=None))
    assert "rows rejected" in shown
    assert "rows dropped" not in shown


def test_a_rows_page_colours_exactly_the_supervised_tokens_and_escapes_the_rest() -> None:
    row = hostile_row()
    tokens = [(piece.visible, " ".join(map(str, piece.ids)), piece.supervised) for piece in row.pieces]
    page = row_page(row.title, row.summary, row.dropped, tokens)
    assert page.count('<span class="s"') + page.count('<span class="t"') == sum(p.supervised for p in row.pieces)
    assert page.count("<span class=") == len(row.pieces)
    assert "<b>" not in page
    shown = unescape(re.sub("<[^>]*>", "", page.partition("<pre>")[2]))
    assert "How many <b>apples</b>␛[31m?" in shown
    assert "in no shard" not in page


def test_a_dropped_rows_page_says_why() -> None:
    assert "in no shard: too few supervised tokens" in row_page("t", "s", "too few supervised tokens", [])


def test_model_text_cannot_break_a_markdown_table() -> None:
    assert code("a\n`b``c` | d\x07") == "``` a↵`b``c` | d␇ ```"
    assert code("") == ""
