"""What can be said of one rendered row, as bits: a column of the shard, a histogram in the statistics."""

import enum


class Flag(enum.IntFlag):
    """Observations on a row. A flag alone drops nothing; policies and the gate decide, and name it when they do."""

    NO_TERMINATOR = 1 << 0
    """The last supervised token is not the turn's terminator."""
    TRUNCATED_BY_LENGTH = 1 << 1
    """The engine stopped at its token limit (finish_reason length)."""
    TRUNCATED_IN_THOUGHT = 1 << 2
    """... and did so before the thought was closed: there is no answer."""
    CLIPPED = 1 << 3
    """Cut here, at the recipe's max_length."""
    EMPTY_THOUGHT = 1 << 4
    """The think block is there and holds only white space."""
    EMPTY_ANSWER = 1 << 5
    """Nothing but white space after the thought."""
    ENGINE_IDS = 1 << 6
    """The ids are the engine's own, used untouched."""
    DRIFT = 1 << 7
    """Its text re-tokenizes to other ids than the engine's."""
    CONTROL_TOKENS_IN_CONTENT = 1 << 8
    """Text of the conversation spells a control token (it was encoded as text)."""
    REPETITION_LOOP = 1 << 9
    """The completion ends in the same few tokens over and over."""
    TOOL_CALLS = 1 << 10
    """The turn calls tools."""
    THOUGHT = 1 << 11
    """The turn has a thought with text in it."""
    THOUGHT_INLINE = 1 << 12
    """... which came between tags in the content."""
    THOUGHT_IN_REASONING = 1 << 13
    """... which came in a field named `reasoning`; one in neither form came in `reasoning_content`."""


TRUNCATED = Flag.TRUNCATED_BY_LENGTH | Flag.TRUNCATED_IN_THOUGHT
"""What the gate counts as truncated: the engine's doing, not ours."""
