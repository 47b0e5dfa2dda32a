"""The lineage: one file, one asset. Thin: an asset body is one core call and its metadata. Never imports torch."""
