"""Completions: one source object -> normalized rows, every line accounted for; and generation through a server."""
