"""A demo that is honest and short: word problems, a tiny reasoning target trained on them, completions sampled from it."""
