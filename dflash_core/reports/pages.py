"""Pages and cards from the templates next to this file: HTML and SVG with every text escaped, Markdown in cells.

A page needs nothing else: styles and pictures are inside.
"""

import base64
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import jinja2

from dflash_core.records import AcceptanceCut, DrafterEval, TrainingSet
from dflash_core.reports import palette, sentences
from dflash_core.statistics.histogram import quantiles
from dflash_core.statistics.statistics import FileStatistics, MergedStatistics, RowExample
from dflash_core.tokenization.flags import TRUNCATED, Flag

FILES_LISTED = 50
FILES_PICTURED = 3
MISSING_LISTED = 200
CUTS_LISTED = 20
"""Files with the lowest acceptance."""

Cell = str | int | float


def render(template: str, values: Mapping[str, object]) -> str:
    """Fill a template, named without its `.j2`; `palette` is always there."""
    return _environment().get_template(f"{template}.j2").render(palette=palette, **values)


@dataclass(frozen=True)
class Table:
    """Rows under a header; numeric columns (by the first row) are on the right."""

    header: Sequence[str]
    rows: Sequence[Sequence[Cell]]

    @property
    def kinds(self) -> list[str]:
        """A CSS class for each column."""
        first = self.rows[0] if self.rows else ()
        return ["n" if not isinstance(cell, str) or cell.endswith(" %") else "" for cell in first]


def training_set_page(
    training_set: TrainingSet,
    merged: MergedStatistics,
    files: Sequence[FileStatistics],
    picture: bytes,
    file_pictures: Mapping[str, bytes],
) -> str:
    """The report on a training set.

    Args:
        training_set: with the verdict.
        merged: statistics of all files.
        files: those of each file.
        picture: of all files, PNG.
        file_pictures: partition -> SVG, of the worst files.
    """
    worst = worst_files(files)
    return render(
        "training_set.html",
        {
            "training_set": training_set,
            "gate": sentences.gate_text(training_set.verdict),
            "tiles": _tiles(training_set),
            "picture": picture,
            "quantiles": _quantile_table(merged),
            "lost": _lost_table(merged),
            "seen": _flag_table(merged),
            "duplicates": _duplicate_tables(merged),
            "file_pictures": file_pictures,
            "worst": _file_table(worst[:FILES_LISTED]),
            "more_files": max(0, len(worst) - FILES_LISTED),
            "worst_rows": _row_table(merged.worst_rows),
            "missing": training_set.missing[:MISSING_LISTED],
            "more_missing": max(0, len(training_set.missing) - MISSING_LISTED),
        },
    )


def row_page(title: str, summary: str, dropped: str | None, tokens: Iterable[tuple[str, str, bool]]) -> str:
    """One row of a shard as training sees it; a token's id shows under the pointer.

    Args:
        title: which row.
        summary: what is known of it.
        dropped: why it is in no shard; None: it is in one.
        tokens: (text, ids, whether it is supervised), in order.
    """
    row = {"title": title, "summary": summary, "dropped": dropped, "tokens": list(tokens)}
    return render("row.html", row)


def acceptance_report(report: DrafterEval, picture: bytes) -> str:
    """The report on an evaluation as Markdown; the picture's bytes come last, so that the text can be read as it is."""
    return render(
        "acceptance.md",
        {
            "report": report,
            "convention": sentences.convention_text(),
            "rivals": [
                (name, f"{length:.2f}", sentences.interval_text(i)) for name, length, i in sentences.rivals(report)
            ],
            "facts": {
                "mean over responses": sentences.response_mean_text(report),
                f"speed ({report.timed_prompts} prompts)": sentences.speed_text(report),
                "output": sentences.lossless_text(report),
                "against the previous drafter": sentences.previous_text(report),
            },
            "cuts": {kind: _cuts(report, kind) for kind in dict.fromkeys(cut.cut for cut in report.cuts)},
            "picture": picture,
        },
    )


def worst_files(files: Sequence[FileStatistics]) -> list[FileStatistics]:
    """Files that lost rows, or have none, largest lost share first."""
    lossy = [file for file in files if file.rows_kept < file.rows_read or not file.rows_read]
    return sorted(lossy, key=lambda f: (f.rows_kept / max(1, f.rows_read), f.partition))


def flag_words(bits: int) -> str:
    """`empty thought, clipped`."""
    return ", ".join((flag.name or "").lower().replace("_", " ") for flag in Flag(bits))


def _tiles(training_set: TrainingSet) -> dict[str, str]:
    files = len(training_set.shards) + len(training_set.missing)
    dropped = {} if training_set.rows_dropped is None else {"rows dropped": f"{training_set.rows_dropped:,}"}
    return {
        "files": f"{len(training_set.shards):,} of {files:,}",
        "rows read": f"{training_set.rows_read:,}",
        "rows kept": f"{training_set.rows_kept:,}",
        **dropped,
        "rows rejected": f"{training_set.rows_rejected:,}",
        "tokens": f"{training_set.tokens:,}",
        "supervised tokens": f"{training_set.supervised_tokens:,}",
    }


def _quantile_table(merged: MergedStatistics) -> Table:
    supervised, lengths = quantiles(merged.supervised), quantiles(merged.lengths)
    return Table(("", "supervised", "length"), [(name, supervised[name], lengths[name]) for name in supervised])


def _lost_table(merged: MergedStatistics) -> Table:
    rejected = [
        (f"rejected: {reason}", rows, f"{example.partition}, line {example.line}: {example.detail}".removesuffix(": "))
        for reason, rows in merged.rejected.items()
        for example in (merged.reject_examples[reason],)
    ]
    dropped = [
        (f"dropped: {reason}", rows, _place(merged.drop_examples[reason])) for reason, rows in merged.dropped.items()
    ]
    return Table(("reason", "rows", "for example"), [*rejected, *dropped])


def _flag_table(merged: MergedStatistics) -> Table:
    whole = merged.rows_rendered
    ends = [
        (f"finish reason {reason}", rows, sentences.share_of(rows, whole), "")
        for reason, rows in merged.finish_reasons.items()
    ]
    flags = [
        (name.lower().replace("_", " "), rows, sentences.share_of(rows, whole), _place(merged.flag_examples[name]))
        for name, rows in merged.flag_counts.items()
    ]
    drift, engine = merged.flagged(Flag.DRIFT), merged.flagged(Flag.ENGINE_IDS)
    rate = ("text re-tokenizes to other ids, of rows with engine ids", drift, sentences.share_of(drift, engine), "")
    return Table(("", "rows", "share", "for example"), [*ends, *flags, *([rate] if engine else [])])


def _duplicate_tables(merged: MergedStatistics) -> list[Table]:
    found = merged.duplicates
    counts = Table(
        ("", "rows"),
        [
            ("text of another row", found.texts),
            ("id of another row", found.ids),
            ("further text under a known id", found.conflicting_ids),
        ],
    )
    repeats = Table(
        ("file", "rows", "first of them"),
        [
            (
                repeat.partition,
                found.by_file[repeat.partition],
                f"line {repeat.line} repeats line {repeat.first_line} of {repeat.first_partition}",
            )
            for repeat in found.repeats
        ],
    )
    return [counts, repeats] if found.repeats else [counts]


def _file_table(files: Sequence[FileStatistics]) -> Table:
    return Table(
        ("file", "read", "kept", "lost", "truncated", "median supervised", "spike", "most rows lost to"),
        [
            (
                file.partition,
                file.rows_read,
                file.rows_kept,
                sentences.share_of(file.rows_read - file.rows_kept, file.rows_read),
                sentences.share_of(file.flagged(TRUNCATED), file.rows_rendered),
                quantiles(file.supervised).get("median", 0),
                f"{sentences.share_of(file.spike.rows, file.rows_rendered)} at {file.spike.low}" if file.spike else "",
                max({**file.rejected, **file.dropped}.items(), key=lambda item: item[1], default=("", 0))[0],
            )
            for file in files
        ],
    )


def _row_table(rows: Sequence[RowExample]) -> Table:
    return Table(
        ("file", "line", "row", "tokens", "supervised", "flags", "dropped"),
        [
            (row.partition, row.line, row.row_id, row.tokens, row.supervised, flag_words(row.flags), row.dropped or "")
            for row in rows
        ],
    )


def _cuts(report: DrafterEval, kind: str) -> dict[str, object]:
    """A table of one kind of cut, and how many were left out."""
    cuts = [cut for cut in report.cuts if cut.cut == kind]
    shown = sorted(cuts, key=lambda cut: cut.acceptance_length)[:CUTS_LISTED] if kind == "file" else cuts
    rivals = ["n-gram", "without features"] if kind == "temperature" else []
    header = ["name", "prompts", "acceptance length", "interval", *rivals]
    left_out = f"The lowest {len(shown)} of {len(cuts)}." if len(shown) < len(cuts) else ""
    return {"header": header, "rows": [_cut_row(cut) for cut in shown], "left_out": left_out}


def _cut_row(cut: AcceptanceCut) -> Sequence[str]:
    rivals = (cut.acceptance_length_ngram, cut.acceptance_length_no_features)
    row = (cut.name, str(cut.prompts), f"{cut.acceptance_length:.2f}", sentences.interval_text(cut.interval))
    return (*row, *(f"{rival:.2f}" for rival in rivals if rival is not None))


def _place(example: RowExample) -> str:
    return f"{example.partition}, line {example.line}"


@cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("dflash_core.reports"),
        autoescape=lambda name: name is not None and name.endswith((".html.j2", ".svg.j2")),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "cell": lambda text: str(text).replace("|", "\\|"),  # in a Markdown table
        "code": code,
        "data_uri": _data_uri,
        "number": lambda cell: cell if isinstance(cell, str) else f"{cell:,}",
    }
    return environment


def _data_uri(image: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(image).decode()}"


def code(text: str) -> str:
    """Text of a model as one harmless Markdown cell: line breaks visible, in a fence longer than any inside."""
    shown = text.replace("\n", "↵").replace("\t", "⇥")
    shown = "".join(c if c.isprintable() else chr(0x2400 + ord(c)) if ord(c) < 32 else "�" for c in shown)
    fence = "`" * (1 + max(map(len, re.findall("`+", shown)), default=0))
    return f"{fence} {shown} {fence}" if shown else ""
