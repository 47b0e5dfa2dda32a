"""How a step is told to people, and how often; without torch."""

import time

from dflash_core.training.metrics import OnStep, StepMetrics

LINE_EVERY_S = 5.0
"""Between the lines of a log."""


def describe(metrics: StepMetrics) -> str:
    """One line: where the run is, how well and how fast it goes."""
    parts = [
        f"step {metrics.step}/{metrics.steps}",
        "skipped (not finite)" if metrics.loss is None else f"loss {metrics.loss:.3f}",
        f"accepted prefix {metrics.accepted_prefix:.2f}",
        f"lr {metrics.learning_rate:.2e}",
        "" if metrics.grad_norm is None else f"gradient {metrics.grad_norm:.2f}",
        f"{metrics.tokens_per_s:,.0f} tokens/s",
        f"waiting {metrics.waiting_share:.0%}",
        f"{duration(metrics.eta_s)} left",
    ]
    if metrics.held_out_loss is not None and metrics.held_out_accepted_prefix is not None:
        parts.append(f"held out: loss {metrics.held_out_loss:.3f}, prefix {metrics.held_out_accepted_prefix:.2f}")
    if metrics.acceptance_length is not None:
        parts.append(f"acceptance length {metrics.acceptance_length:.2f}")
    return ", ".join(part for part in parts if part)


def duration(seconds: float) -> str:
    """h:mm:ss, or m:ss below an hour."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def every(seconds: float, show: OnStep) -> OnStep:
    """Show at most one step in that time, but each one that measured something, was skipped, is first or last."""
    shown_at = -seconds

    def report(metrics: StepMetrics) -> None:
        nonlocal shown_at
        measured = metrics.held_out_loss is not None or metrics.acceptance_length is not None
        special = measured or metrics.skipped or metrics.step in (1, metrics.steps)
        now = time.monotonic()
        if special or now - shown_at >= seconds:
            shown_at = now
            show(metrics)

    return report
