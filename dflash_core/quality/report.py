"""The report on a training set: one HTML file that needs nothing else, pictures inside, every text escaped."""

import base64
from collections.abc import Iterable, Sequence
from html import escape

from dflash_core.quality.file_picture import file_picture
from dflash_core.quality.flags import TRUNCATED, Flag
from dflash_core.quality.histogram import quantiles
from dflash_core.quality.plots import worst_files
from dflash_core.quality.statistics import FileStatistics, MergedStatistics, RowExample
from dflash_core.records import TrainingSet

FILES_LISTED = 50
FILES_PICTURED = 3
MISSING_LISTED = 200

STYLE = """
body { font: 14px/1.5 system-ui, sans-serif; color: #1f2933; background: #f5f7f9; margin: 0; }
main { max-width: 1180px; margin: 0 auto; padding: 24px; }
h1 { font-size: 22px; margin: 0 0 4px; } h2 { font-size: 16px; margin: 0 0 12px; }
section { background: #fff; border: 1px solid #e4e7eb; border-radius: 8px; padding: 18px 20px; margin: 16px 0;
  overflow-x: auto; }
.verdict { display: inline-block; padding: 2px 12px; border-radius: 12px; color: #fff; font-weight: 600; }
.pass { background: #2f855a; } .fail { background: #d1404f; }
.muted { color: #66727f; } .tiles { display: flex; flex-wrap: wrap; gap: 12px 36px; }
.tiles b { display: block; font-size: 20px; }
ul { margin: 8px 0 0; } ul:empty { display: none; } li { margin: 4px 0; overflow-wrap: anywhere; }
img { max-width: 100%; display: block; margin: 6px 0; }
table { border-collapse: collapse; width: 100%; font-size: 13px; }
th { text-align: left; color: #66727f; font-weight: 500; } td.n, th.n { text-align: right; }
th, td { padding: 4px 14px 4px 0; border-bottom: 1px solid #eef1f4; vertical-align: top; }
td { overflow-wrap: anywhere; } td.n { font-variant-numeric: tabular-nums; white-space: nowrap; }
.columns { display: grid; grid-template-columns: repeat(auto-fit, minmax(440px, 1fr)); gap: 0 16px; }
"""

Cell = str | int | float


def training_set_report(
    training_set: TrainingSet, merged: MergedStatistics, files: Sequence[FileStatistics], picture: bytes
) -> str:
    """The whole page; `picture` is the PNG over all files (`merged_plot`)."""
    named = f"training set {training_set.hash}"
    body = "\n".join(
        (
            _head(training_set),
            _section("All files", _picture(picture, "distributions over all files")),
            '<div class="columns">',
            _section("Tokens per row", _quantile_table(merged)),
            _section("Rejected and dropped rows", _loss_table(merged)),
            _section("What was seen in the rows", _flag_table(merged)),
            _section("Duplicates", _duplicate_table(merged)),
            "</div>",
            _section("Worst files", _worst_file_pictures(files), _file_table(files)),
            _section("Rows with the fewest supervised tokens", _row_table(merged.worst_rows)),
            _missing(training_set.missing),
        )
    )
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(named)}</title>'
        f"<style>{STYLE}</style></head><body><main>{body}</main></body></html>\n"
    )


def _head(training_set: TrainingSet) -> str:
    verdict = training_set.verdict
    files = len(training_set.shards) + len(training_set.missing)
    tiles = (
        ("files", f"{len(training_set.shards):,} of {files:,}"),
        ("rows read", f"{training_set.rows_read:,}"),
        ("rows kept", f"{training_set.rows_kept:,}"),
        ("rows rejected", f"{training_set.rows_rejected:,}"),
        ("tokens", f"{training_set.tokens:,}"),
        ("supervised tokens", f"{training_set.supervised_tokens:,}"),
    )
    state = ("pass", "gate passed") if verdict.passed else ("fail", "gate failed")
    reasons = "".join(f"<li>{escape(reason)}</li>" for reason in verdict.reasons)
    made_by = f"recipe {escape(training_set.recipe)} · tokenization {escape(training_set.fingerprint)}"
    return (
        f"<h1>Training set {escape(training_set.hash)}</h1>"
        f'<div class="muted">{made_by}</div>'
        f'<section><span class="verdict {state[0]}">{state[1]}</span><ul>{reasons}</ul></section>'
        '<section><div class="tiles">'
        + "".join(f'<div><b>{value}</b><span class="muted">{name}</span></div>' for name, value in tiles)
        + "</div></section>"
    )


def _quantile_table(merged: MergedStatistics) -> str:
    supervised, lengths = quantiles(merged.supervised), quantiles(merged.lengths)
    return _table(("", "supervised", "length"), ((name, supervised[name], lengths[name]) for name in supervised))


def _loss_table(merged: MergedStatistics) -> str:
    rejected = (
        (f"rejected: {reason}", rows, f"{example.partition}, line {example.line}: {example.detail}".removesuffix(": "))
        for reason, rows in merged.rejected.items()
        for example in (merged.reject_examples[reason],)
    )
    dropped = (
        (f"dropped: {reason}", rows, _place(merged.drop_examples[reason])) for reason, rows in merged.dropped.items()
    )
    return _table(("reason", "rows", "for example"), (*rejected, *dropped))


def _flag_table(merged: MergedStatistics) -> str:
    flags = (
        (name.lower().replace("_", " "), rows, _share(rows, merged.rows_rendered), _place(merged.flag_examples[name]))
        for name, rows in merged.flag_counts.items()
    )
    ends = (
        (f"finish reason {reason}", rows, _share(rows, merged.rows_rendered), "")
        for reason, rows in merged.finish_reasons.items()
    )
    drift = merged.flagged(Flag.DRIFT)
    engine = merged.flagged(Flag.ENGINE_IDS)
    rate = (("text re-tokenizes to other ids, of rows with engine ids", drift, _share(drift, engine), ""),)
    return _table(("", "rows", "share", "for example"), (*ends, *flags, *(rate if engine else ())))


def _duplicate_table(merged: MergedStatistics) -> str:
    found = merged.duplicates
    counts = _table(
        ("", "rows"),
        (
            ("text of another row", found.texts),
            ("id of another row", found.ids),
            ("further text under a known id", found.conflicting_ids),
        ),
    )
    repeats = (
        (r.partition, found.by_file[r.partition], f"line {r.line} repeats line {r.first_line} of {r.first_partition}")
        for r in found.repeats
    )
    return counts + (_table(("file", "rows", "first of them"), repeats) if found.repeats else "")


def _worst_file_pictures(files: Sequence[FileStatistics]) -> str:
    return "".join(
        f"<div>{escape(file.partition)}</div>{_picture(file_picture(file), file.partition, 'svg+xml')}"
        for file in worst_files(files)[:FILES_PICTURED]
    )


def _file_table(files: Sequence[FileStatistics]) -> str:
    worst = worst_files(files)
    header = ("file", "read", "kept", "lost", "truncated", "median supervised", "spike", "most rows lost to")
    rows = (
        (
            file.partition,
            file.rows_read,
            file.rows_kept,
            _share(file.rows_read - file.rows_kept, file.rows_read),
            _share(file.flagged(TRUNCATED), file.rows_rendered),
            quantiles(file.supervised).get("median", 0),
            f"{_share(file.spike.rows, file.rows_rendered)} at {file.spike.low}" if file.spike else "",
            max({**file.rejected, **file.dropped}.items(), key=lambda item: item[1], default=("", 0))[0],
        )
        for file in worst[:FILES_LISTED]
    )
    more = f"<p>{len(worst) - FILES_LISTED:,} more files lost rows.</p>" if len(worst) > FILES_LISTED else ""
    return _table(header, rows) + more


def _row_table(rows: Sequence[RowExample]) -> str:
    header = ("file", "line", "row", "tokens", "supervised", "flags", "dropped")
    return _table(
        header,
        (
            (row.partition, row.line, row.row_id, row.tokens, row.supervised, _flags(row.flags), row.dropped or "")
            for row in rows
        ),
    )


def _missing(missing: Sequence[str]) -> str:
    if not missing:
        return ""
    more = f" and {len(missing) - MISSING_LISTED:,} more" if len(missing) > MISSING_LISTED else ""
    return _section("Files without a valid shard", f"<p>{escape(', '.join(missing[:MISSING_LISTED]))}{more}</p>")


def _table(header: Sequence[str], rows: Iterable[Sequence[Cell]]) -> str:
    """A table whose numeric columns (by the first row) stand to the right."""
    cells = list(rows)
    if not cells:
        return '<p class="muted">none</p>'
    kinds = ["n" if _numeric(cell) else "" for cell in cells[0]]
    head = "".join(f'<th class="{kind}">{escape(name)}</th>' for name, kind in zip(header, kinds, strict=True))
    lines = (
        "".join(f'<td class="{kind}">{_text(cell)}</td>' for cell, kind in zip(row, kinds, strict=True))
        for row in cells
    )
    return f"<table><tr>{head}</tr>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def _numeric(cell: Cell) -> bool:
    return not isinstance(cell, str) or cell.endswith(" %")


def _text(cell: Cell) -> str:
    return escape(cell) if isinstance(cell, str) else f"{cell:,}"


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "0.0 %"


def _place(example: RowExample) -> str:
    return f"{example.partition}, line {example.line}"


def _flags(bits: int) -> str:
    return ", ".join((flag.name or "").lower().replace("_", " ") for flag in Flag(bits))


def _picture(image: bytes, caption: str, kind: str = "png") -> str:
    return f'<img alt="{escape(caption)}" src="data:image/{kind};base64,{base64.b64encode(image).decode()}">'


def _section(title: str, *parts: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{''.join(parts)}</section>"
