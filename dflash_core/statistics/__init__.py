"""What rows are like, as counts that add up: of one file, and of all files together."""
