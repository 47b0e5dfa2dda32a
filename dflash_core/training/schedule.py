"""The learning rate, a pure function of the step: nothing to save, nothing to be off by one after a resume."""

import math

from dflash_core.recipe import Training

DECAY_SHARE = 0.2
"""Last part of a WSD (warm-up, stable, decay) run, in which the rate falls linearly to zero."""


def learning_rate(step: int, steps: int, training: Training) -> float:
    """Rate of step `step` (from 0) of `steps`: linear warm-up, then cosine to zero, or constant and a linear decay."""
    warmup = round(training.warmup_share * steps)
    if step < warmup:
        return training.learning_rate * (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    if training.schedule == "cosine":
        return training.learning_rate * 0.5 * (1.0 + math.cos(math.pi * done))
    return training.learning_rate * min(1.0, (1.0 - done) / DECAY_SHARE)
