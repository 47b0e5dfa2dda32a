"""What people read at a terminal: all the text, and no control characters."""

from io import StringIO

import polars as pl
from rich.console import Console

from dflash_core.cli.terminal import found_rows, inspected_row
from tests.console import shown
from tests.shards.inspected import hostile_row


def test_a_row_is_shown_with_all_its_text_and_no_control_character() -> None:
    out = StringIO()
    Console(file=out, width=4000, color_system=None).print(inspected_row(hostile_row()))
    assert "How many <b>apples</b>␛[31m?" in out.getvalue()
    assert "and eight and one make nine. Nine.<|im_end|>" in out.getvalue()
    assert "part%20one, line 1, row q:1 <b>" in out.getvalue()
    assert "\x1b" not in out.getvalue()


def test_a_dropped_row_says_why() -> None:
    text = shown(inspected_row(hostile_row("too few supervised tokens")))
    assert "in no shard: too few supervised tokens; rendered again from the source file" in text
    assert "in no shard" not in shown(inspected_row(hostile_row()))


def test_found_rows_are_named_by_file_and_line_whatever_their_ids() -> None:
    rows = pl.DataFrame(
        {
            "file": ["a[b]", "c"],
            "line": [3, 12],
            "row_id": ["[red]x[/]", "y"],
            "tokens": [1234, 5],
            "supervised_tokens": [1000, 2],
            "finish_reason": ["stop", "unknown"],
            "flags": ["empty thought, clipped", ""],
        }
    )
    first, second = (line.split("  ") for line in shown(found_rows(rows)).splitlines()[1:])
    assert [cell.strip() for cell in first if cell.strip()] == [
        *("a[b]:3", "[red]x[/]", "1,234", "1,000", "stop", "empty thought, clipped")
    ]
    assert [cell.strip() for cell in second if cell.strip()] == ["c:12", "y", "5", "2", "unknown"]
    assert len(shown(found_rows(rows.clear())).splitlines()) == 1
