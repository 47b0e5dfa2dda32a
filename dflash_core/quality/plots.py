"""Pictures of the merged statistics as PNG bytes, for Dagster's metadata and the report.

Drawn with matplotlib's object interface on Agg: no pyplot, no global state, safe in threads and without a display.
"""

import io
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.gridspec import GridSpec
from matplotlib.ticker import FuncFormatter, MaxNLocator

from dflash_core.quality.file_picture import AMBER, BINS, BLUE, GRID, INK, MUTED, RED, short
from dflash_core.quality.histogram import Histogram, equal_bins, quantiles
from dflash_core.quality.statistics import Counts, FileStatistics, MergedStatistics, Spike
from dflash_core.records import GeneratedFile

BARS = 7
WORST_FILES = 10


def merged_plot(merged: MergedStatistics, files: Sequence[FileStatistics]) -> bytes:
    """One picture of all files: distributions above, reasons and the worst files below."""
    figure = _figure(11.5, 6.6)
    rows = GridSpec(2, 1, figure=figure)
    above, below = figure.add_subfigure(rows[0]), figure.add_subfigure(rows[1])
    left, right = above.subplots(1, 2, width_ratios=(1.5, 1))
    supervised_axes(left, merged)
    lengths_axes(right, merged)
    ends, lost, worst = below.subplots(1, 3, width_ratios=(0.8, 1.1, 1.1))
    finish_axes(ends, merged)
    lost_axes(lost, merged)
    worst_files_axes(worst, files)
    return _png(figure)


def generation_plot(generated: GeneratedFile) -> bytes:
    """One picture of a generated file: what the answers are worth, how long they are, how long they took."""
    figure = _figure(9.6, 2.7)
    worth, tokens, seconds = figure.subplots(1, 3, width_ratios=(1.1, 1.2, 1.2))
    colours = dict.fromkeys(generated.outcomes, AMBER) | {"good": BLUE, "refused": RED, "unanswered": RED}
    _bars(worth, generated.outcomes, colours, "Answers", rendered=max(1, sum(generated.outcomes.values())))
    _histogram_axes(tokens, generated.completion_histogram, None)
    _decorate(tokens, "Tokens per answer", "tokens", "answers")
    _histogram_axes(seconds, generated.answer_seconds, None)
    _decorate(seconds, "Time per answer", "seconds", "answers")
    return _png(figure)


def supervised_axes(axes: Axes, counts: Counts) -> None:
    """Supervised tokens a row over all rendered rows, the spike in red with its numbers."""
    _histogram_axes(axes, counts.supervised, counts.spike)
    _decorate(axes, "Supervised tokens per row", "tokens", "rows")


def lengths_axes(axes: Axes, counts: Counts) -> None:
    """Tokens a row, prompt included."""
    _histogram_axes(axes, counts.lengths, None)
    _decorate(axes, "Length per row", "tokens", "rows")


def finish_axes(axes: Axes, counts: Counts) -> None:
    """Why the engine stopped, as it said."""
    _bars(axes, counts.finish_reasons, {"length": AMBER}, "Finish reasons", rendered=counts.rows_rendered)


def lost_axes(axes: Axes, counts: Counts) -> None:
    """Rows rejected or dropped, by reason."""
    lost = dict(sorted({**counts.rejected, **counts.dropped}.items(), key=lambda item: -item[1]))
    colours = dict.fromkeys(counts.rejected, RED) | dict.fromkeys(counts.dropped, AMBER)
    _bars(axes, lost, colours, "Rejected (red) and dropped (amber) rows", rendered=counts.rows_read)


def worst_files_axes(axes: Axes, files: Sequence[FileStatistics]) -> None:
    """The files that lost the largest share of their rows."""
    worst = worst_files(files)[:WORST_FILES]
    places = range(len(worst))
    start = np.zeros(len(worst))
    rejected, dropped = [f.rows_rejected for f in worst], [sum(f.dropped.values()) for f in worst]
    read = np.array([max(1, f.rows_read) for f in worst])
    for label, colour, rows in (("rejected", RED, rejected), ("dropped", AMBER, dropped)):
        shares = 100 * np.array(rows) / read
        axes.barh(places, shares, left=start, height=0.62, color=colour, label=label)
        start = start + shares
    for place, share in zip(places, start, strict=True):
        axes.text(share, place, f" {share:.1f} %", va="center", ha="left", fontsize=7.5, color=INK)
    axes.set_yticks(places, [_short(f.partition, 24) for f in worst])
    axes.set_xlim(0, max(1.0, 1.25 * float(start.max(initial=0.0))))
    axes.set_ylim(max(len(worst), 4) - 0.5, -0.5)
    _decorate(axes, "Files that lost most" if worst else "No file lost a row", "% of rows read", "")
    axes.grid(visible=False, axis="y")
    if worst:
        axes.legend(fontsize=7.5, frameon=False, loc="lower right")


def worst_files(files: Sequence[FileStatistics]) -> list[FileStatistics]:
    """Files that lost rows, or have none, largest lost share first."""
    lossy = [file for file in files if file.rows_kept < file.rows_read or not file.rows_read]
    return sorted(lossy, key=lambda f: (f.rows_kept / max(1, f.rows_read), f.partition))


def _histogram_axes(axes: Axes, counts: Histogram, spike: Spike | None) -> None:
    """Equal bins up to where the tail gets thin, everything above in the last bin."""
    if not counts:
        axes.text(0.5, 0.5, "no rows", transform=axes.transAxes, ha="center", va="center", color=MUTED)
        return
    bins = equal_bins(counts, BINS, (spike.low, spike.high) if spike else None)
    edges, plain, special, highest = bins.edges, bins.outside, bins.inside, bins.highest
    axes.stairs(plain, edges, fill=True, color=BLUE, linewidth=0)
    if special.any():
        axes.stairs(plain + special, edges, baseline=plain, fill=True, color=RED, linewidth=0)
    axes.set_xlim(0, edges[-1])
    axes.set_ylim(0, 1.12 * float((plain + special).max()))
    notes = [f"median {quantiles(counts)['median']:,} (dashed)"]
    if highest >= edges[-1]:
        notes.append(f"last bar: up to {highest:,}")
    axes.axvline(quantiles(counts)["median"], color=INK, linewidth=0.9, linestyle=(0, (3, 2)))
    axes.text(0.99, 0.97, "\n".join(notes), transform=axes.transAxes, ha="right", va="top", fontsize=7.5, color=MUTED)
    if spike is not None:
        place = min(int(np.searchsorted(edges, spike.low, side="right")), len(special)) - 1
        height = min(float((plain + special)[place]), 0.8 * axes.get_ylim()[1])
        _label_spike(axes, spike, (float(edges[place : place + 2].mean()), height))


def _label_spike(axes: Axes, spike: Spike, bar: tuple[float, float]) -> None:
    """Below the notes, where the tail is thin, with an arrow to the spike's bar (tokens, rows)."""
    place = f"{spike.low}" if spike.low == spike.high else f"{spike.low} to {spike.high}"
    text = f"{100 * spike.share:.1f} % of all rows\nhave {place} tokens"
    if spike.example is not None:
        text += f"\ne.g. {_short(spike.example.partition, 24)}\nline {spike.example.line}"
    axes.annotate(
        text,
        xy=bar,
        xytext=(0.93, 0.76),
        textcoords="axes fraction",
        ha="right",
        va="top",
        fontsize=8,
        color=RED,
        bbox={"facecolor": "white", "alpha": 0.85, "linewidth": 0, "pad": 1.5},
        arrowprops={"arrowstyle": "->", "color": RED, "linewidth": 1},
    )


def _bars(axes: Axes, rows: Mapping[str, int], colours: Mapping[str, str], title: str, *, rendered: int) -> None:
    """Horizontal bars, one a name, with count and share; the smallest are summed up."""
    shown = dict(list(rows.items())[:BARS])
    rest = sum(rows.values()) - sum(shown.values())
    if rest:
        shown[f"{len(rows) - BARS} more"] = rest
    places = range(len(shown))
    axes.barh(places, list(shown.values()), height=0.62, color=[colours.get(name, BLUE) for name in shown])
    for place, count in zip(places, shown.values(), strict=True):
        text = f" {count:,} ({100 * count / max(1, rendered):.1f} %)"
        axes.text(count, place, text, va="center", ha="left", fontsize=7.5, color=INK)
    axes.set_yticks(places, [_short(name, 24) for name in shown])
    axes.set_xlim(0, 1.75 * max(1, *shown.values(), 0))
    axes.set_ylim(max(len(shown), 4) - 0.5, -0.5)
    _decorate(axes, title, "rows", "")
    axes.grid(visible=False, axis="y")
    if not shown:
        axes.text(0.5, 0.5, "none", transform=axes.transAxes, ha="center", va="center", color=MUTED)


def _decorate(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set_title(title, loc="left", fontsize=9.5, fontweight="bold", color=INK, pad=7)
    axes.set_xlabel(x, fontsize=8, color=MUTED)
    axes.set_ylabel(y, fontsize=8, color=MUTED)
    axes.tick_params(labelsize=7.5, colors=MUTED, length=0)
    axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.grid(color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(GRID)


def _figure(width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height), dpi=100, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def _png(figure: Figure) -> bytes:
    out = io.BytesIO()
    figure.savefig(out, format="png")
    return out.getvalue()


def _short(text: str, width: int) -> str:
    """At most `width` characters; no accidental mathtext."""
    return short(text.replace("$", r"\$"), width)
