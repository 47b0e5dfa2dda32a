"""One small picture of a file: supervised tokens, lengths, and what became of its rows; as SVG.

Written by hand rather than by matplotlib: one is drawn for every one of maybe thousands of files and kept in Dagster's
event log, and so it takes 1 ms and 5 KB instead of 100 ms and 30 KB, and stays sharp at any size.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from html import escape
from math import floor, log10

from dflash_core.quality.flags import TRUNCATED
from dflash_core.quality.histogram import Histogram, equal_bins, quantiles
from dflash_core.quality.statistics import Counts, FileStatistics, Spike

INK, MUTED, GRID = "#1f2933", "#66727f", "#e4e7eb"
BLUE, RED, AMBER, TEAL = "#4a78b5", "#d1404f", "#e3a33a", "#6fa8a0"
BINS = 48
BARS = 6
WIDTH, HEIGHT = 960, 230
TOP, BASE = 40.0, 190.0
"""Of the plots, in the picture's own units, downwards."""
ROW_HEIGHT = 22.0


@dataclass(frozen=True)
class Span:
    """A panel's place from left to right."""

    left: float
    right: float

    @property
    def width(self) -> float:
        """Between the two."""
        return self.right - self.left


def file_picture(statistics: FileStatistics) -> bytes:
    """The picture of one file's statistics."""
    parts = [
        *_histogram(Span(50, 370), "Supervised tokens per row", statistics.supervised, statistics.spike),
        *_histogram(Span(425, 640), "Length per row", statistics.lengths, None),
        *_rows(Span(795, 880), statistics),
    ]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
    body = "\n".join(parts)
    return f'{head} font-family="sans-serif"><rect width="100%" height="100%" fill="#fff"/>\n{body}\n</svg>'.encode()


def rows_by_fate(counts: Counts) -> dict[str, tuple[int, str]]:
    """What became of the rows, by reason, and how many the engine cut short: name -> (rows, colour)."""
    fates = {"kept": (counts.rows_kept, BLUE)}
    fates |= {reason: (rows, AMBER) for reason, rows in counts.dropped.items()}
    fates |= {reason: (rows, RED) for reason, rows in counts.rejected.items()}
    truncated = counts.flagged(TRUNCATED)
    return fates | ({"(ended by length)": (truncated, TEAL)} if truncated else {})


def short(text: str, width: int) -> str:
    """At most `width` characters, the middle left out."""
    return text if len(text) <= width else f"{text[: width // 2]}…{text[-(width - width // 2 - 1) :]}"


def _histogram(span: Span, title: str, counts: Histogram, spike: Spike | None) -> Iterator[str]:
    yield _text(span.left, 20, title, size=13, colour=INK, bold=True)
    if not counts:
        yield _text((span.left + span.right) / 2, (TOP + BASE) / 2, "no rows", anchor="middle")
        return
    bins = equal_bins(counts, BINS, (spike.low, spike.high) if spike else None)
    most, reach = int((bins.outside + bins.inside).max()), int(bins.edges[-1])
    up, along = (BASE - TOP) / (1.12 * most), span.width / reach
    for tick in _ticks(most):
        yield _line(span.left, BASE - up * tick, span.right, BASE - up * tick)
        yield _text(span.left - 6, BASE - up * tick + 4, f"{tick:,}", anchor="end")
    for tick in _ticks(reach):
        yield _text(span.left + along * tick, BASE + 16, f"{tick:,}", anchor="middle")
    yield _text((span.left + span.right) / 2, BASE + 32, "tokens", anchor="middle")
    step = along * float(bins.edges[1])
    yield _bars(span.left, step, (up * bins.outside).tolist(), [0.0] * len(bins.outside), BLUE)
    if spike is not None:
        yield _bars(span.left, step, (up * bins.inside).tolist(), (up * bins.outside).tolist(), RED)
    median = quantiles(counts)["median"]
    yield _line(span.left + along * median, TOP, span.left + along * median, BASE, INK, dash=True)
    notes = [(f"median {median:,} (dashed)", MUTED)]
    if bins.highest >= reach:
        notes.append((f"last bar: up to {bins.highest:,}", MUTED))
    notes += [(line, RED) for line in _spike_notes(spike)]
    for place, (note, colour) in enumerate(notes):
        yield _text(span.right, TOP + 8 + 14 * place, note, colour=colour, anchor="end", halo=True)


def _spike_notes(spike: Spike | None) -> list[str]:
    if spike is None:
        return []
    place = f"{spike.low}" if spike.low == spike.high else f"{spike.low} to {spike.high}"
    example = [f"e.g. line {spike.example.line}"] if spike.example is not None else []
    return [f"{100 * spike.share:.1f} % of all rows have {place} tokens", *example]


def _rows(span: Span, counts: Counts) -> Iterator[str]:
    """Horizontal bars, one a fate, with count and share; the smallest are summed up."""
    yield _text(660, 20, "Rows", size=13, colour=INK, bold=True)
    fates = _summed_up(rows_by_fate(counts))
    most = max(1, *(rows for rows, _ in fates.values()))
    for place, (name, (rows, colour)) in enumerate(fates.items()):
        top = TOP + ROW_HEIGHT * place
        length = span.width * rows / most
        yield f'<rect x="{span.left:.0f}" y="{top:.0f}" width="{length:.1f}" height="14" fill="{colour}"/>'
        yield _text(span.left - 6, top + 11, short(name, 22), anchor="end")
        share = f"{rows:,} ({100 * rows / max(1, counts.rows_read):.1f} %)"
        yield _text(span.left + length + 4, top + 11, share, colour=INK)


def _summed_up(fates: Mapping[str, tuple[int, str]]) -> dict[str, tuple[int, str]]:
    shown, rest = dict(list(fates.items())[:BARS]), list(fates.values())[BARS:]
    return shown | ({f"{len(rest)} more": (sum(rows for rows, _ in rest), MUTED)} if rest else {})


def _ticks(most: int) -> range:
    """Round numbers up to `most`, three to seven of them where there are as many."""
    step = 10 ** floor(log10(max(1, most / 3)))
    return range(0, most + 1, next((step * n for n in (1, 2, 5) if most / (step * n) <= 5), step * 10))


def _bars(left: float, step: float, heights: list[float], below: list[float], colour: str) -> str:
    """All bars as one path; `below` is how high each starts above the base."""
    bars = (
        f"M{left + step * place:.1f} {BASE - start:.1f}v{-height:.1f}h{step:.1f}v{height:.1f}z"
        for place, (height, start) in enumerate(zip(heights, below, strict=True))
        if height
    )
    return f'<path fill="{colour}" d="{"".join(bars)}"/>'


def _line(x1: float, y1: float, x2: float, y2: float, colour: str = GRID, dash: bool = False) -> str:
    dashed = ' stroke-dasharray="4 3"' if dash else ""
    return f'<path stroke="{colour}"{dashed} d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}"/>'


def _text(
    x: float,
    y: float,
    text: str,
    *,
    size: int = 11,
    colour: str = MUTED,
    anchor: str = "start",
    bold: bool = False,
    halo: bool = False,
) -> str:
    extra = (' font-weight="bold"' if bold else "") + (
        ' stroke="#fff" stroke-width="3" paint-order="stroke"' if halo else ""
    )
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text {place} font-size="{size}" fill="{colour}"{extra}>{escape(text)}</text>'
