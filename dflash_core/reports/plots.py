"""Every picture that matplotlib draws, as PNG bytes: training set, generated file, learning curve, acceptance.

Drawn with matplotlib's object interface on Agg: no pyplot, no global state, safe in threads and without a display.
"""

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.gridspec import GridSpec
from matplotlib.ticker import FuncFormatter, MaxNLocator
from numpy.typing import NDArray

from dflash_core.records import AcceptanceCut, DrafterEval, GeneratedFile
from dflash_core.reports.file_picture import BINS
from dflash_core.reports.pages import worst_files
from dflash_core.reports.palette import AMBER, BLUE, GRID, INK, MUTED, PAPER, RED, TEAL
from dflash_core.reports.sentences import Interval, interval_text, percent, rivals, short, speed_text
from dflash_core.statistics.histogram import Histogram, equal_bins, quantiles
from dflash_core.statistics.statistics import FileStatistics, MergedStatistics, Spike

MOST_BARS = 7
WORST_FILES = 10
MOST_CUTS = 9
SMOOTHED_OVER = 40
"""A learning curve is a mean over this part of the run."""
WIDTH = 24
"""Characters of a name."""
BEHIND_TEXT = {"facecolor": PAPER, "alpha": 0.85, "linewidth": 0, "pad": 1.5}
"""What keeps a note readable on bars and lines."""

Points = list[tuple[int, float]]


def training_set_picture(merged: MergedStatistics, files: Sequence[FileStatistics]) -> bytes:
    """All files: distributions above, reasons and the worst files below."""
    figure = _figure(11.5, 6.6)
    rows = GridSpec(2, 1, figure=figure)
    above, below = figure.add_subfigure(rows[0]), figure.add_subfigure(rows[1])
    left, right = above.subplots(1, 2, width_ratios=(1.5, 1))
    _histogram(left, "Supervised tokens per row", merged.supervised, merged.spike)
    _histogram(right, "Length per row", merged.lengths)
    ends, lost, worst = below.subplots(1, 3, width_ratios=(0.8, 1.1, 1.1))
    _bars(ends, "Finish reasons", merged.finish_reasons, {"length": AMBER}, merged.rows_rendered)
    reasons = dict(sorted({**merged.rejected, **merged.dropped}.items(), key=lambda item: -item[1]))
    colours = dict.fromkeys(merged.rejected, RED) | dict.fromkeys(merged.dropped, AMBER)
    _bars(lost, "Rejected (red) and dropped (amber) rows", reasons, colours, merged.rows_read)
    _worst_files(worst, files)
    return _png(figure)


def generation_picture(generated: GeneratedFile) -> bytes:
    """A generated file: what the answers are worth, how long they are, how long they took."""
    figure = _figure(9.6, 2.7)
    worth, tokens, seconds = figure.subplots(1, 3, width_ratios=(1.1, 1.2, 1.2))
    colours = dict.fromkeys(generated.outcomes, AMBER) | {"good": BLUE, "refused": RED, "unanswered": RED}
    _bars(worth, "Answers", generated.outcomes, colours, max(1, sum(generated.outcomes.values())))
    _histogram(tokens, "Tokens per answer", generated.completion_histogram, what="answers")
    _histogram(seconds, "Time per answer", generated.answer_seconds, unit="seconds", what="answers")
    return _png(figure)


def learning_curve(metrics: Path) -> bytes:
    """A training run: loss on the left, accepted tokens a verification on the right.

    Args:
        metrics: the run's JSON lines.
    """
    with metrics.open(encoding="utf8") as lines:
        steps = [json.loads(line) for line in lines]
    figure = _figure(9.0, 3.4, dpi=110)
    losses, accepted = figure.subplots(1, 2)
    _smoothed(losses, _points(steps, "loss"))
    _marked(losses, _points(steps, "held_out_loss"), AMBER, "held out")
    _decorate(losses, "Loss", "step", "nats")
    losses.set_ylim(bottom=0)
    _smoothed(accepted, _points(steps, "accepted_prefix"))
    _marked(accepted, _points(steps, "held_out_accepted_prefix"), AMBER, "held out, teacher-forced")
    _marked(accepted, _points(steps, "acceptance_length"), RED, "held out, draft and verify")
    _decorate(accepted, "Accepted", "step", "tokens a verification")
    accepted.set_ylim(1, max(1.1, accepted.get_ylim()[1]))
    for axes in (losses, accepted):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False, fontsize=8, labelcolor=INK)
    return _png(figure)


def acceptance_picture(report: DrafterEval) -> bytes:
    """An evaluation: six panels under one line that says what was measured."""
    figure = _figure(11.5, 6.6)
    (compared, slots, steps), (cuts, responses, speed) = figure.subplots(2, 3)
    _rivals(compared, report)
    _slots(slots, report)
    _steps(steps, report)
    _cuts(cuts, report)
    _responses(responses, report)
    _speed(speed, report)
    figure.suptitle(
        f"{_plain(report.run)}: acceptance length {report.acceptance_length:.2f} "
        f"({interval_text(report.acceptance_interval)}), block size {report.block_size}, {report.prompts} prompts, "
        f"temperature {report.temperature:g}",
        x=0.01,
        ha="left",
        fontsize=11.5,
        fontweight="bold",
        color=INK,
    )
    return _png(figure)


def _worst_files(axes: Axes, files: Sequence[FileStatistics]) -> None:
    """The files that lost the largest share of their rows."""
    worst = worst_files(files)[:WORST_FILES]
    places = range(len(worst))
    start = np.zeros(len(worst))
    read = np.array([max(1, f.rows_read) for f in worst])
    lost = (("rejected", RED, [f.rows_rejected for f in worst]), ("dropped", AMBER, [f.rows_dropped for f in worst]))
    for label, colour, rows in lost:
        shares = 100 * np.array(rows) / read
        axes.barh(places, shares, left=start, height=0.62, color=colour, label=label)
        start = start + shares
    for place, share in zip(places, start, strict=True):
        _label(axes, share, place, f"{share:.1f} %")
    axes.set_yticks(places, [_name(f.partition) for f in worst])
    axes.set_xlim(0, max(1.0, 1.25 * float(start.max(initial=0.0))))
    axes.set_ylim(max(len(worst), 4) - 0.5, -0.5)
    _decorate(axes, "Files that lost most" if worst else "No file lost a row", "% of rows read", "", grid="x")
    if worst:
        axes.legend(fontsize=7.5, frameon=False, loc="lower right")


def _histogram(
    axes: Axes,
    title: str,
    counts: Histogram,
    spike: Spike | None = None,
    *,
    unit: str = "tokens",
    what: str = "rows",
) -> None:
    """Equal bins up to where the tail gets thin, everything above in the last bin; the spike in red."""
    _decorate(axes, title, unit, what)
    axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    if not counts:
        axes.text(0.5, 0.5, "no rows", transform=axes.transAxes, ha="center", va="center", color=MUTED)
        return
    bins = equal_bins(counts, BINS, (spike.low, spike.high) if spike else None)
    edges, plain, special = bins.edges, bins.outside, bins.inside
    axes.stairs(plain, edges, fill=True, color=BLUE, linewidth=0)
    if special.any():
        axes.stairs(plain + special, edges, baseline=plain, fill=True, color=RED, linewidth=0)
    axes.set_xlim(0, edges[-1])
    axes.set_ylim(0, 1.12 * float((plain + special).max()))
    median = quantiles(counts)["median"]
    notes = [f"median {median:,} (dashed)"]
    if bins.highest >= edges[-1]:
        notes.append(f"last bar: up to {bins.highest:,}")
    _dashed(axes, median)
    axes.text(
        0.99,
        0.97,
        "\n".join(notes),
        transform=axes.transAxes,
        ha="right",
        va="top",
        fontsize=7.5,
        color=MUTED,
        bbox=BEHIND_TEXT,
    )
    if spike is not None:
        place = min(int(np.searchsorted(edges, spike.low, side="right")), len(special)) - 1
        height = min(float((plain + special)[place]), 0.8 * axes.get_ylim()[1])
        _label_spike(axes, spike, (float(edges[place : place + 2].mean()), height))


def _label_spike(axes: Axes, spike: Spike, bar: tuple[float, float]) -> None:
    """Below the notes, where the tail is thin, with an arrow to the spike's bar (tokens, rows)."""
    text = f"{percent(spike.share)} of all rows\nhave {spike.place} tokens"
    if spike.example is not None:
        text += f"\ne.g. {_name(spike.example.partition)}\nline {spike.example.line}"
    axes.annotate(
        text,
        xy=bar,
        xytext=(0.93, 0.76),
        textcoords="axes fraction",
        ha="right",
        va="top",
        fontsize=8,
        color=RED,
        bbox=BEHIND_TEXT,
        arrowprops={"arrowstyle": "->", "color": RED, "linewidth": 1},
    )


def _bars(axes: Axes, title: str, rows: Mapping[str, int], colours: Mapping[str, str], whole: int) -> None:
    """Horizontal bars, one a name, with count and share of `whole`; the smallest are summed up."""
    shown = dict(list(rows.items())[:MOST_BARS])
    rest = sum(rows.values()) - sum(shown.values())
    if rest:
        shown[f"{len(rows) - MOST_BARS} more"] = rest
    places = range(len(shown))
    axes.barh(places, list(shown.values()), height=0.62, color=[colours.get(name, BLUE) for name in shown])
    for place, count in zip(places, shown.values(), strict=True):
        _label(axes, count, place, f"{count:,} ({percent(count / max(1, whole))})")
    axes.set_yticks(places, [_name(name) for name in shown])
    axes.set_xlim(0, 1.75 * max(1, *shown.values(), 0))
    axes.set_ylim(max(len(shown), 4) - 0.5, -0.5)
    _decorate(axes, title, "rows", "", grid="x")
    axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    if not shown:
        axes.text(0.5, 0.5, "none", transform=axes.transAxes, ha="center", va="center", color=MUTED)


def _points(steps: list[dict[str, Any]], name: str) -> Points:
    return [(int(step["step"]), float(step[name])) for step in steps if step.get(name) is not None]


def _smoothed(axes: Axes, points: Points) -> None:
    """The raw values faintly, their running mean on top."""
    if not points:
        return
    x, y = np.array(points, dtype=np.float64).T
    axes.plot(x, y, color=BLUE, alpha=0.2, linewidth=0.7)
    axes.plot(x, _running_mean(y, max(1, len(y) // SMOOTHED_OVER)), color=BLUE, linewidth=1.6, label="training rows")


def _marked(axes: Axes, points: Points, colour: str, label: str) -> None:
    if points:
        x, y = zip(*points, strict=True)
        axes.plot(x, y, color=colour, linewidth=1.4, marker="o", markersize=4, label=f"{label}: {y[-1]:.2f}")


def _running_mean(values: NDArray[np.float64], width: int) -> NDArray[np.float64]:
    """Of each value and the `width` - 1 before it, fewer at the beginning."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(0, ends - width)
    return np.asarray((sums[ends] - sums[starts]) / (ends - starts))


def _rivals(axes: Axes, report: DrafterEval) -> None:
    """Ours and what it must beat, at the report's temperature and the others."""
    colours = (BLUE, AMBER, RED)
    names = ("drafter", "n-gram", "no features")
    rows: list[tuple[str, str, float, Interval | None]] = [
        (name, colour, length, interval)
        for name, colour, (_, length, interval) in zip(names, colours, rivals(report), strict=True)
    ]
    for cut in (cut for cut in report.cuts if cut.cut == "temperature"):
        lengths = (cut.acceptance_length, cut.acceptance_length_ngram, cut.acceptance_length_no_features)
        rows += [
            (f"{name}, T = {cut.name}", colour, length, cut.interval if name == "drafter" else None)
            for name, colour, length in zip(names, colours, lengths, strict=True)
            if length is not None
        ]
    ends = [length if interval is None else max(length, interval[1]) for *_, length, interval in rows]
    for place, (_, colour, length, interval) in enumerate(rows):
        axes.barh(place, length, height=0.6, color=colour, alpha=1.0 if place < 3 else 0.6, linewidth=0)
        if interval is not None:
            axes.plot(interval, [place, place], color=INK, linewidth=1.2)
        _label(axes, ends[place], place, f" {length:.2f}")
    axes.set_yticks(range(len(rows)), [name for name, *_ in rows])
    axes.set_xlim(0, 1.15 * max(ends))
    axes.invert_yaxis()
    _decorate(axes, "Acceptance length", "tokens per verification", "", grid="x")


def _slots(axes: Axes, report: DrafterEval) -> None:
    """How often a slot is accepted once all before it were."""
    slots = np.arange(1, report.block_size)
    shares = 100 * np.array(report.conditional_acceptance)
    axes.bar(slots, shares, width=0.68, color=BLUE, linewidth=0)
    if len(slots) <= 10:
        for slot, share in enumerate(shares.tolist(), 1):
            axes.text(slot, share + 1.5, f"{share:.0f}", ha="center", fontsize=8, color=INK)
    axes.set_ylim(0, 108)
    axes.set_xticks(slots if len(slots) <= 10 else slots[::2])
    _decorate(axes, "Accepted, given all slots before", "slot", "%", grid="y")


def _steps(axes: Axes, report: DrafterEval) -> None:
    """How many proposals the steps accepted."""
    counts = np.array(report.histogram)
    shares = 100 * counts / max(1, counts.sum())
    axes.bar(range(len(counts)), shares, width=0.68, color=[*[BLUE] * (len(counts) - 1), TEAL], linewidth=0)
    axes.set_xticks(range(0, len(counts), 1 if len(counts) <= 10 else 2))
    title = f"Accepted per step ({counts.sum():,} steps)"
    _decorate(axes, title, "proposals accepted (green: all)", "% of steps", grid="y")


def _cuts(axes: Axes, report: DrafterEval) -> None:
    """The parts of the prompts: folders and thinking states, and the files with the lowest acceptance."""
    others = [cut for cut in report.cuts if cut.cut in ("folder", "thinking")]
    files = sorted((cut for cut in report.cuts if cut.cut == "file"), key=lambda cut: cut.acceptance_length)
    room = max(3, MOST_CUTS - len(others))
    shown = [*files[:room], *others[:MOST_CUTS]]
    for place, cut in enumerate(shown):
        colour = BLUE if cut.cut == "file" else TEAL
        if cut.interval is not None:
            axes.plot(cut.interval, [place, place], color=colour, linewidth=2.2, solid_capstyle="round", alpha=0.55)
        axes.plot(cut.acceptance_length, place, "o", color=colour, markersize=5)
    _dashed(axes, report.acceptance_length)
    axes.set_yticks(range(len(shown)), [_cut_name(cut) for cut in shown])
    axes.set_ylim(max(len(shown), 3) - 0.5, -0.5)
    more = f" (lowest {room} of {len(files)})" if len(files) > room else ""
    title = f"By file{more} and thinking" if others else f"By file{more}"
    _decorate(axes, title, "acceptance length", "", grid="x")


def _responses(axes: Axes, report: DrafterEval) -> None:
    """The acceptance length of each response that had a verification step."""
    lengths = np.array(report.acceptance_length_per_prompt)[np.array(report.verification_steps_per_prompt) > 0]
    edges = np.linspace(1, report.block_size, min(2 * report.block_size - 1, 25))
    counts, _ = np.histogram(lengths, edges)
    axes.stairs(counts, edges, fill=True, color=BLUE, linewidth=0)
    mean = report.acceptance_length_response_mean
    _dashed(axes, mean)
    axes.text(0.02, 0.96, f"mean {mean:.2f} (dashed)", transform=axes.transAxes, va="top", fontsize=8, color=MUTED)
    axes.set_ylim(0, 1.18 * max(1, counts.max()))
    _decorate(axes, "Per response", "acceptance length", "responses", grid="y")


def _speed(axes: Axes, report: DrafterEval) -> None:
    """Tokens a second of a single reader."""
    rows = (("with the drafter", BLUE, report.tokens_per_s), ("target alone", MUTED, report.tokens_per_s_without))
    for place, (_, colour, speed) in enumerate(rows):
        axes.barh(place, speed, height=0.5, color=colour, linewidth=0)
        _label(axes, speed, place, f" {speed:,.0f}")
    axes.set_yticks(range(2), [name for name, *_ in rows])
    axes.set_ylim(2.1, -0.6)
    axes.set_xlim(0, 1.2 * max(speed for *_, speed in rows))
    note = speed_text(report).partition(":")[0]
    axes.text(0.0, 0.04, note, transform=axes.transAxes, fontsize=8.5, color=INK)
    _decorate(axes, "Speed of a single reader", f"tokens per second ({report.timed_prompts} prompts)", "", grid="x")


def _cut_name(cut: AcceptanceCut) -> str:
    name = cut.name if cut.cut in ("file", "folder") else f"{cut.cut} {cut.name}"
    return f"{_name(name)} ({cut.prompts})"


def _name(text: str) -> str:
    """At most `WIDTH` characters."""
    return _plain(short(text, WIDTH))


def _plain(text: str) -> str:
    """No accidental mathtext."""
    return text.replace("$", r"\$")


def _dashed(axes: Axes, x: float) -> None:
    """An upright line at a value that a note names."""
    axes.axvline(x, color=INK, linewidth=0.9, linestyle=(0, (3, 2)))


def _label(axes: Axes, x: float, y: float, text: str) -> None:
    """Behind the end of a bar."""
    axes.text(x, y, f" {text}", va="center", ha="left", fontsize=7.5, color=INK)


def _decorate(axes: Axes, title: str, x: str, y: str, *, grid: Literal["both", "x", "y"] = "both") -> None:
    axes.set_title(title, loc="left", fontsize=9.5, fontweight="bold", color=INK, pad=7)
    axes.set_xlabel(x, fontsize=8, color=MUTED)
    axes.set_ylabel(y, fontsize=8, color=MUTED)
    axes.tick_params(labelsize=7.5, colors=MUTED, length=0)
    axes.grid(visible=True, axis=grid, color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(GRID)


def _figure(width: float, height: float, dpi: int = 100) -> Figure:
    figure = Figure(figsize=(width, height), dpi=dpi, layout="constrained", facecolor=PAPER)
    FigureCanvasAgg(figure)
    return figure


def _png(figure: Figure) -> bytes:
    out = io.BytesIO()
    figure.savefig(out, format="png")
    return out.getvalue()
