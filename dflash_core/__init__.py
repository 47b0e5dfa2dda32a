"""Plain Python and PyTorch: from completions in S3 to an exported drafter. Knows nothing of Dagster."""

CODE_VERSION = "1"
"""Raised by hand whenever token ids, masks or shard bytes change for the same input; part of every fingerprint."""
