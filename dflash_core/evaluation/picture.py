"""The picture of an evaluation as PNG bytes: rivals, slots, steps, files, responses and speed.

Drawn with matplotlib's object interface on Agg: no pyplot, no global state, works without a display.
"""

import io

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from dflash_core.evaluation.acceptance import Interval, interval_text
from dflash_core.quality.file_picture import AMBER, BLUE, GRID, INK, MUTED, RED
from dflash_core.records import AcceptanceCut, DrafterEval

TEAL = "#6fa8a0"
MOST_CUTS = 9
WIDTH_LIMIT = 26


def acceptance_picture(report: DrafterEval) -> bytes:
    """Six panels under one line that says what was measured."""
    figure = Figure(figsize=(11.5, 6.6), dpi=100, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    (rivals, slots, steps), (cuts, responses, speed) = figure.subplots(2, 3)
    _rivals_axes(rivals, report)
    _slots_axes(slots, report)
    _steps_axes(steps, report)
    _cuts_axes(cuts, report)
    _responses_axes(responses, report)
    _speed_axes(speed, report)
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
    out = io.BytesIO()
    figure.savefig(out, format="png")
    return out.getvalue()


def _rivals_axes(axes: Axes, report: DrafterEval) -> None:
    """Ours and what it must beat, at the report's temperature and the others."""
    further = [cut for cut in report.cuts if cut.cut == "temperature"]
    rows: list[tuple[str, str, float, Interval | None]] = [
        ("drafter", BLUE, report.acceptance_length, report.acceptance_interval),
        ("n-gram", AMBER, report.acceptance_length_ngram, report.acceptance_interval_ngram),
        ("no features", RED, report.acceptance_length_no_features, report.acceptance_interval_no_features),
    ]
    for cut in further:
        rows.append((f"drafter, T = {cut.name}", BLUE, cut.acceptance_length, cut.interval))
        for name, colour, value in (
            ("n-gram", AMBER, cut.acceptance_length_ngram),
            ("no features", RED, cut.acceptance_length_no_features),
        ):
            if value is not None:
                rows.append((f"{name}, T = {cut.name}", colour, value, None))
    ends = [length if interval is None else max(length, interval[1]) for *_, length, interval in rows]
    for place, (_, colour, length, interval) in enumerate(rows):
        axes.barh(place, length, height=0.6, color=colour, alpha=1.0 if place < 3 else 0.6, linewidth=0)
        if interval is not None:
            axes.plot(interval, [place, place], color=INK, linewidth=1.2)
        axes.text(ends[place], place, f"  {length:.2f}", va="center", fontsize=8, color=INK)
    axes.set_yticks(range(len(rows)), [name for name, *_ in rows])
    axes.set_xlim(0, 1.15 * max(ends))
    axes.invert_yaxis()
    _decorate(axes, "Acceptance length", "tokens per verification", "", "x")


def _slots_axes(axes: Axes, report: DrafterEval) -> None:
    """How often a slot is accepted once all before it were."""
    slots = np.arange(1, report.block_size)
    shares = 100 * np.array(report.conditional_acceptance)
    axes.bar(slots, shares, width=0.68, color=BLUE, linewidth=0)
    if len(slots) <= 10:
        for slot, share in enumerate(shares.tolist(), 1):
            axes.text(slot, share + 1.5, f"{share:.0f}", ha="center", fontsize=8, color=INK)
    axes.set_ylim(0, 108)
    axes.set_xticks(slots if len(slots) <= 10 else slots[::2])
    _decorate(axes, "Accepted, given all slots before", "slot", "%", "y")


def _steps_axes(axes: Axes, report: DrafterEval) -> None:
    """How many proposals the steps accepted."""
    counts = np.array(report.histogram)
    shares = 100 * counts / max(1, counts.sum())
    axes.bar(range(len(counts)), shares, width=0.68, color=[*[BLUE] * (len(counts) - 1), TEAL], linewidth=0)
    axes.set_xticks(range(0, len(counts), 1 if len(counts) <= 10 else 2))
    _decorate(axes, f"Accepted per step ({counts.sum():,} steps)", "proposals accepted (green: all)", "% of steps", "y")


def _cuts_axes(axes: Axes, report: DrafterEval) -> None:
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
    axes.axvline(report.acceptance_length, color=INK, linewidth=0.9, linestyle=(0, (3, 2)))
    axes.set_yticks(range(len(shown)), [_cut_name(cut) for cut in shown])
    axes.set_ylim(max(len(shown), 3) - 0.5, -0.5)
    more = f" (lowest {room} of {len(files)})" if len(files) > room else ""
    _decorate(axes, f"By file{more} and thinking" if others else f"By file{more}", "acceptance length", "", "x")


def _responses_axes(axes: Axes, report: DrafterEval) -> None:
    """The acceptance length of each response that had a verification step."""
    lengths = np.array(report.acceptance_length_per_prompt)[np.array(report.verification_steps_per_prompt) > 0]
    edges = np.linspace(1, report.block_size, min(2 * report.block_size - 1, 25))
    counts, _ = np.histogram(lengths, edges)
    axes.stairs(counts, edges, fill=True, color=BLUE, linewidth=0)
    mean = report.acceptance_length_response_mean
    axes.axvline(mean, color=INK, linewidth=0.9, linestyle=(0, (3, 2)))
    axes.text(0.02, 0.96, f"mean {mean:.2f} (dashed)", transform=axes.transAxes, va="top", fontsize=8, color=MUTED)
    axes.set_ylim(0, 1.18 * max(1, counts.max()))
    _decorate(axes, "Per response", "acceptance length", "responses", "y")


def _speed_axes(axes: Axes, report: DrafterEval) -> None:
    """Tokens a second of a single reader."""
    rows = (("with the drafter", BLUE, report.tokens_per_s), ("target alone", MUTED, report.tokens_per_s_without))
    for place, (_, colour, speed) in enumerate(rows):
        axes.barh(place, speed, height=0.5, color=colour, linewidth=0)
        axes.text(speed, place, f"  {speed:,.0f}", va="center", fontsize=8, color=INK)
    axes.set_yticks(range(2), [name for name, *_ in rows])
    axes.set_ylim(2.1, -0.6)
    axes.set_xlim(0, 1.2 * max(speed for *_, speed in rows))
    note = f"speed-up {report.speed_up:.2f} ({interval_text(report.speed_up_interval)})"
    axes.text(0.0, 0.04, note, transform=axes.transAxes, fontsize=8.5, color=INK)
    _decorate(axes, "Speed of a single reader", f"tokens per second ({report.timed_prompts} prompts)", "", "x")


def _cut_name(cut: AcceptanceCut) -> str:
    name = cut.name if cut.cut in ("file", "folder") else f"{cut.cut} {cut.name}"
    name = name if len(name) <= WIDTH_LIMIT else f"{name[: WIDTH_LIMIT // 2]}…{name[-(WIDTH_LIMIT // 2 - 1) :]}"
    return _plain(f"{name} ({cut.prompts})")


def _decorate(axes: Axes, title: str, x: str, y: str, grid: str) -> None:
    axes.set_title(title, loc="left", fontsize=9.5, fontweight="bold", color=INK, pad=7)
    axes.set_xlabel(x, fontsize=8, color=MUTED)
    axes.set_ylabel(y, fontsize=8, color=MUTED)
    axes.tick_params(labelsize=8, colors=MUTED, length=0)
    axes.grid(visible=True, axis="x" if grid == "x" else "y", color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(GRID)


def _plain(text: str) -> str:
    """No accidental mathtext."""
    return text.replace("$", r"\$")
