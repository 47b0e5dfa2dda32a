"""Plain Python and PyTorch: from completions in S3 to an exported drafter. Knows nothing of Dagster."""

TOKENIZATION_VERSION = "3"
"""Raised by hand whenever ids, masks, shards or statistics change for the same input; part of every fingerprint."""
TRAINING_VERSION = "1"
"""Raised by hand when training code changes the weights that the same inputs give; part of every run's name."""
