"""Which rows training never sees: a pure function of seed and conversation, so no list of rows is kept anywhere."""

from hashlib import blake2b


def uniform(*parts: str | int) -> float:
    """A number in [0, 1) that depends on `parts` and nothing else (blake2b of their length-prefixed text)."""
    return uniform_bits(*parts) / 2**64


def uniform_bits(*parts: str | int) -> int:
    """The 64 bits behind `uniform`."""
    text = "".join(f"{len(part)}:{part}" for part in map(str, parts))
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


def is_held_out(seed: int, conversation: str, share: float) -> bool:
    """Whether its rows belong to the held-out `share`: stable under any other change to the data.

    A conversation is held out whole: a later turn has the earlier ones, answers included, in its prompt.
    """
    return uniform("held out", seed, conversation) < share
