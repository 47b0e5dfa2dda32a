"""Plain Python and PyTorch: from completions in S3 to an exported drafter. Knows nothing of Dagster."""

TOKENIZATION_VERSION = "4"
"""Raised by hand whenever ids, masks, shards or statistics change for the same input; part of every fingerprint."""
GENERATION_VERSION = "2"
"""Raised by hand when what is asked, or which answers are kept, changes for the same recipe; part of every request."""
TRAINING_VERSION = "1"
"""Raised by hand when training code changes the weights that the same inputs give; part of every run's name."""
