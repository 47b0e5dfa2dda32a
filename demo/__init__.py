"""A demo that is honest and short: word problems, a tiny target trained on them, and what the target answers."""
