"""One source object -> completions or rejects: every line is accounted for."""
