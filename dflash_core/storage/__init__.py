"""S3: the store, every key in it, the partitions, and the embedded store for laptops and tests."""
