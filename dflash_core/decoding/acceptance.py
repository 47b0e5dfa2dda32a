"""Acceptance from counts of verification steps: one convention, that of serving engines' metrics; and how sure it is.

The trade-off: intervals are bootstrapped over prompts, since the steps of one answer resemble each other and would
pretend to be more evidence than they are. Too few prompts hide their own spread (one of them has none at all), so below
`LEAST_PROMPTS` there is no interval, rather than a narrow one.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from dflash_core.records import LEAST_PROMPTS
from dflash_core.reports.sentences import Interval

StepCounts = NDArray[np.float64]
"""[prompts, 2]: accepted proposals and verification steps of each prompt."""

RESAMPLES = 2000
CONFIDENCE = 0.95


def acceptance_length(histogram: Sequence[int]) -> float:
    """1 + accepted drafts / verification steps; 1.0 where there was no step.

    Args:
        histogram: [K] steps that accepted 0, 1, ... K-1 proposals.
    """
    steps = sum(histogram)
    return 1 + sum(n * count for n, count in enumerate(histogram)) / steps if steps else 1.0


def conditional_acceptance(histogram: Sequence[int]) -> tuple[float, ...]:
    """[K-1] share of slot k accepted given that slots 1..k-1 were; 0.0 where none got that far."""
    reached = [sum(histogram[k:]) for k in range(len(histogram))]
    return tuple(reached[k] / reached[k - 1] if reached[k - 1] else 0.0 for k in range(1, len(histogram)))


def accepted_by_position(histogram: Sequence[int]) -> tuple[float, ...]:
    """[K-1] share of all steps that accepted proposals 1..k: what serving engines print per position."""
    steps = sum(histogram)
    return tuple(sum(histogram[k:]) / steps if steps else 0.0 for k in range(1, len(histogram)))


def add_histograms(histograms: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The sum of histograms of one length."""
    return tuple(sum(column) for column in zip(*histograms, strict=True))


def counts_of(histograms: Sequence[Sequence[int]]) -> StepCounts:
    """The counts of prompts with these histograms."""
    return np.array([[sum(n * c for n, c in enumerate(h)), sum(h)] for h in histograms], np.float64).reshape(-1, 2)


def length_of(counts: StepCounts) -> float:
    """The acceptance length of all these prompts together."""
    accepted, steps = counts.sum(0)
    return float(1 + accepted / steps) if steps else 1.0


def acceptance_interval(counts: StepCounts) -> Interval | None:
    """Of the acceptance length; None: too few prompts have a verification step."""
    told = counts[counts[:, 1] > 0]
    return bootstrap(len(told), lambda chosen: _lengths(told[chosen]))


def difference_interval(ours: StepCounts, theirs: StepCounts) -> Interval | None:
    """Of the difference of acceptance lengths, ours minus theirs, the same prompts line by line; None: too few."""
    told = (ours[:, 1] > 0) | (theirs[:, 1] > 0)
    mine, others = ours[told], theirs[told]
    return bootstrap(len(mine), lambda chosen: _lengths(mine[chosen]) - _lengths(others[chosen]))


def bootstrap(prompts: int, statistic: Callable[[NDArray[np.int64]], StepCounts]) -> Interval | None:
    """Percentile interval of a statistic over prompts drawn with replacement, the same draws every time.

    None for fewer than `LEAST_PROMPTS`.

    Args:
        prompts: how many there are.
        statistic: [resamples, prompts] indices -> [resamples] values.
    """
    if prompts < LEAST_PROMPTS:
        return None
    words = np.random.Philox(key=0).random_raw(RESAMPLES * prompts).reshape(RESAMPLES, prompts)
    values = statistic((words % np.uint64(prompts)).astype(np.int64))
    low, high = np.quantile(values, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)


def _lengths(counts: StepCounts) -> StepCounts:
    """[resamples, prompts, 2] -> [resamples] acceptance lengths."""
    accepted, steps = np.moveaxis(counts.sum(1), -1, 0)
    return np.asarray(1 + accepted / np.maximum(steps, 1), np.float64)
