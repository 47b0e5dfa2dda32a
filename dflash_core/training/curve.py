"""The learning curve of a run as one picture, from its JSON lines: what the checkpoint's metadata shows."""

import json
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

SMOOTHED_OVER = 40
"""The line is a mean over this part of the run."""
INK, FAINT, TRAIN, HELD_OUT, REAL = "#24292f", "#d0d7de", "#0969da", "#bc4c00", "#1a7f37"
Points = list[tuple[int, float]]


def learning_curve(metrics: Path) -> bytes:
    """A PNG: loss on the left, accepted tokens a verification on the right.

    Args:
        metrics: the run's JSON lines.
    """
    with metrics.open(encoding="utf8") as lines:
        steps = [json.loads(line) for line in lines]
    figure = Figure(figsize=(9.0, 3.4), layout="constrained", facecolor="white")
    losses, accepted = figure.subplots(1, 2)
    _axes(losses, "loss, nats")
    _train_line(losses, _points(steps, "loss"))
    _marked_line(losses, _points(steps, "held_out_loss"), HELD_OUT, "held out")
    losses.set_ylim(bottom=0)
    _axes(accepted, "tokens a verification")
    _train_line(accepted, _points(steps, "accepted_prefix"))
    _marked_line(accepted, _points(steps, "held_out_accepted_prefix"), HELD_OUT, "held out, teacher-forced")
    _marked_line(accepted, _points(steps, "acceptance_length"), REAL, "held out, draft and verify")
    accepted.set_ylim(1, max(1.1, accepted.get_ylim()[1]))
    for axes in (losses, accepted):
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False, fontsize=8, labelcolor=INK)
    image = BytesIO()
    figure.savefig(image, format="png", dpi=110)
    return image.getvalue()


def _points(steps: list[dict[str, Any]], name: str) -> Points:
    return [(int(step["step"]), float(step[name])) for step in steps if step.get(name) is not None]


def _train_line(axes: Axes, points: Points) -> None:
    """The raw values faintly, their running mean on top."""
    if not points:
        return
    x, y = np.array(points, dtype=np.float64).T
    axes.plot(x, y, color=TRAIN, alpha=0.18, linewidth=0.7)
    axes.plot(x, _running_mean(y, max(1, len(y) // SMOOTHED_OVER)), color=TRAIN, linewidth=1.6, label="training rows")


def _marked_line(axes: Axes, points: Points, colour: str, label: str) -> None:
    if points:
        x, y = zip(*points, strict=True)
        axes.plot(x, y, color=colour, linewidth=1.4, marker="o", markersize=4, label=f"{label}: {y[-1]:.2f}")


def _running_mean(values: NDArray[np.float64], width: int) -> NDArray[np.float64]:
    """Of each value and the `width` - 1 before it, fewer at the beginning."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(0, ends - width)
    return np.asarray((sums[ends] - sums[starts]) / (ends - starts))


def _axes(axes: Axes, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=10, color=INK)
    axes.set_xlabel("step", fontsize=9, color=INK)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    axes.grid(color=FAINT, linewidth=0.6)
    axes.tick_params(labelsize=8, colors=INK, length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)
