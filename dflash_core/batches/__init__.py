"""From shards to batches: which rows are held out, a memory-mapped cache of all rows, their order, padded batches."""
