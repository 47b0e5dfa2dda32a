"""Which rows training never sees. A pure function of (seed, row id), so no list of rows has to be kept anywhere."""

from hashlib import blake2b


def uniform(*parts: str | int) -> float:
    """A number in [0, 1) that depends on `parts` and nothing else (blake2b of their length-prefixed text)."""
    return uniform_bits(*parts) / 2**64


def uniform_bits(*parts: str | int) -> int:
    """The 64 bits behind `uniform`."""
    text = "".join(f"{len(part)}:{part}" for part in map(str, parts))
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


def is_held_out(seed: int, row_id: str, share: float) -> bool:
    """Whether the row belongs to the held-out `share` of rows: stable under any other change to the data."""
    return uniform("held out", seed, row_id) < share
