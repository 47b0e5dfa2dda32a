"""The lineage: one file, one asset. Thin: an asset body is one core call and its metadata. Never imports torch."""

import warnings

# Backfill policies are in beta for years; Dagster says so at every load, in every run. By its words: importing its
# class here would make every command pay for Dagster.
warnings.filterwarnings("ignore", message=r".* is currently in (beta|preview)")
