"""S3: client, keys, verified reads, whole writes; and the embedded store for laptops and tests."""
