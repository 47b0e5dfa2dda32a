"""Completions -> rows of ids with one supervised span each, one by one and by the book; and rows as columns.

A row is cut for encoding only at added-token edges, where byte-level tokenizers provably do not look across, and each
cut is checked: the prompt's own ids have to be the beginning of the row's ids, and a finished turn has to end in its
terminator.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dflash_core.completions.completion import Completion, Rejected
from dflash_core.generation.prompt_file import Prompt
from dflash_core.recipe import TokenizationSettings
from dflash_core.tokenization.backends import Backend, Ids, Offsets
from dflash_core.tokenization.chat_template import template_message
from dflash_core.tokenization.flags import Flag
from dflash_core.tokenization.tokenizer import ChatTokenizer, load_tokenizer
from dflash_core.tokenization.turns import TurnRenderer, TurnText

MAX_LITERAL_CHARS = 1024
"""Longer template texts hold a prompt and are not worth remembering."""
I64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class EncodedRow:
    """One row before policies: all of its ids."""

    row_id: str
    line: int
    finish_reason: str | None
    flags: int
    ids: Ids
    start: int
    """First supervised token."""
    end: int
    """One past the last supervised token."""


@dataclass(frozen=True)
class RowColumns:
    """n rows in columns; also the form after policies, where `dropped` says why a row is not kept."""

    row_ids: list[str]
    lines: I64
    """Line in the source file, from 1; several rows share a line where every answer is a row."""
    finish_reasons: list[str | None]
    flags: I64
    """`Flag` bits."""
    ids: Ids
    """All rows' ids, one after the other."""
    offsets: Offsets
    """n + 1 boundaries in `ids`."""
    start: I64
    """First supervised token of each row, from the row's beginning."""
    end: I64
    dropped: list[str | None]

    def __post_init__(self) -> None:
        lengths = {name: len(column) - (name == "offsets") for name, column in vars(self).items() if name != "ids"}
        if len(set(lengths.values())) != 1:
            raise ValueError(f"columns of different lengths: {lengths}")

    def __len__(self) -> int:
        return len(self.row_ids)


def columns_of(rows: Sequence[EncodedRow], longest: int) -> RowColumns:
    """Rows as columns, their ids cut at `longest` tokens; spans stay as they are, for policies to judge."""
    pieces = [row.ids[:longest] for row in rows]
    return RowColumns(
        row_ids=[row.row_id for row in rows],
        lines=np.array([row.line for row in rows], np.int64),
        finish_reasons=[row.finish_reason for row in rows],
        flags=np.array([row.flags for row in rows], np.int64),
        ids=np.concatenate(pieces) if rows else np.zeros(0, np.int32),
        offsets=np.cumsum([0, *map(len, pieces)], dtype=np.int64),
        start=np.array([row.start for row in rows], np.int64),
        end=np.array([row.end for row in rows], np.int64),
        dropped=[None] * len(rows),
    )


class ExactEncoder:
    """The reference path, one turn at a time: the template rendered in full, every boundary checked."""

    def __init__(self, renderer: TurnRenderer, backend: Backend, *, whole: bool = False) -> None:
        """`whole` encodes each row in one piece, cut nowhere: slower, and what a cut is compared with."""
        self._whole = whole
        self.renderer = renderer
        self.backend = backend
        self.terminator = renderer.tokenizer.added[renderer.end.terminator]
        self.literal = lru_cache(maxsize=256)(self._encode)

    def encode(self, completion: Completion) -> EncodedRow | Rejected:
        """The row of one completion; or why there is none: the template refuses it, its boundary is not certain, or its
        engine ids are not of this tokenizer.
        """
        try:
            if completion.completion_token_ids is not None:
                return self._engine_row(completion)
            return self.text_row(self.renderer.render(completion))
        except Rejected as rejected:
            return rejected

    def text_row(self, text: TurnText) -> EncodedRow:
        """The row of a rendered turn; raises Rejected."""
        counted = self._supervised_scaffold(text)
        if self._whole:
            text = replace(text, head="", tail=text.head + text.tail, rest=text.head + text.rest)
        encode = self._encode_protected if text.protected else self._encode
        head, rest = encode(text.head), encode(text.rest)
        known = text.tail + text.scaffold
        expected = encode(known) if text.protected or len(known) >= MAX_LITERAL_CHARS else self.literal(known)
        if rest[: len(expected)] != expected:
            raise Rejected("boundary unstable", "the answer's first token reaches into the prompt")
        start = len(head) + len(expected) - counted
        ids, end = [*head, *rest], len(head) + len(rest)
        if text.terminated:
            after = self.literal(self.renderer.end.after)
            end -= len(after)
            if not self.renderer.end.written:
                ids.append(self.terminator)
                end += 1
            if ids[end - 1] != self.terminator or tuple(ids[end:]) != after:
                raise Rejected("boundary unstable", "the turn does not end in its terminator")
        return EncodedRow(text.row_id, text.line, text.finish_reason, text.flags, np.array(ids, np.int32), start, end)

    def _supervised_scaffold(self, text: TurnText) -> int:
        """Tokens of the scaffold that count in the loss.

        A token that holds the end of the prompt and the beginning of the scaffold belongs to the prompt.
        """
        if not text.scaffold_counts or not text.scaffold:
            return 0
        encoding = self.renderer.tokenizer.reference.encode(text.tail + text.scaffold, add_special_tokens=False)
        return sum(begin >= len(text.tail) for begin, _ in encoding.offsets)

    def _engine_row(self, completion: Completion) -> EncodedRow:
        prompt, answer = completion.prompt_token_ids or (), completion.completion_token_ids or ()
        vocabulary = self.renderer.tokenizer.vocabulary
        if max(*prompt, *answer) >= vocabulary:
            raise Rejected("malformed engine ids", f"an id beyond the tokenizer's {vocabulary}")
        ids = np.array([*prompt, *answer], np.int32)
        flags, finish_reason = Flag.ENGINE_IDS, completion.finish_reason
        if finish_reason == "length":
            flags |= Flag.TRUNCATED_BY_LENGTH
        try:
            text = self.renderer.render(completion)
            row = self.text_row(text)
            flags |= Flag(text.flags) & ~Flag.NO_TERMINATOR
            flags |= Flag.DRIFT if not np.array_equal(row.ids[: row.end], ids) else Flag(0)
        except Rejected:
            flags |= Flag.DRIFT  # its text cannot even be rendered; the engine's ids can be trusted all the same
        if answer[-1] != self.terminator:
            flags |= Flag.NO_TERMINATOR
        return EncodedRow(completion.row_id, completion.line, finish_reason, int(flags), ids, len(prompt), len(ids))

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self.backend.encode([text])[0].tolist())

    def _encode_protected(self, text: str) -> tuple[int, ...]:
        if not self.renderer.control.is_protected(text):
            return self._encode(text)
        if not self.renderer.tokenizer.cuttable >= self.renderer.tokenizer.special:
            raise Rejected("control tokens in content", "this tokenizer cannot encode them apart from the rest")
        found: list[int] = []
        for piece in self.renderer.control.split_structure(text):
            protected = self.renderer.control.is_protected(piece)
            found += self.backend.encode([self.renderer.control.spell(piece)], special_as_text=protected)[0].tolist()
        return tuple(found)


@dataclass
class PromptEncoder:
    """A prompt's token ids as the recipe's tokenizer and template give them: what a server is compared with.

    The tokenizer is read when the first prompt comes; then RecipeError, if it cannot be.
    """

    folder: Path
    rules: TokenizationSettings

    def __call__(self, prompt: Prompt) -> list[int]:
        """The ids, generation prompt included; raises Rejected where the template does not accept the conversation."""
        messages = [template_message(message) for message in prompt.messages]
        text = self._tokenizer.template.render(messages, prompt.tools, add_generation_prompt=True)
        return self._tokenizer.ids(text)

    @cached_property
    def _tokenizer(self) -> ChatTokenizer:
        return load_tokenizer(self.folder, self.rules)
