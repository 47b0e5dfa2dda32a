"""Acceptance from counts of verification steps: one convention, that of serving engines' metrics."""

from collections.abc import Sequence


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


def add(histograms: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The sum of histograms of one length."""
    return tuple(sum(column) for column in zip(*histograms, strict=True))
