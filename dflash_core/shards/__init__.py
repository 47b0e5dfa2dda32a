"""A source file -> its shard: many files side by side, and nothing that is valid is done again."""
