"""Many turns at once: spliced text, one bulk encode, every row checked; what fails a check takes the exact path.

The checks are what makes splicing safe: a row's ids have to begin with the plan's own prompt ids behind the cut, end
in the terminator, and hold exactly as many added tokens as the template printed. One more means that a text spells
one.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dflash_core.completions.record import Completion, Refused
from dflash_core.tokenization.backends import Backend, Ids, Offsets
from dflash_core.tokenization.rows import ExactEncoder, Row
from dflash_core.tokenization.splice import SplicePlan, Splicer
from dflash_core.tokenization.turns import TurnRenderer

Item = tuple[Completion, int]
"""A completion and the message index of one of its turns."""


@dataclass(frozen=True)
class PlanIds:
    """What every row of one plan has in its ids."""

    known: Ids
    """Behind the cut: the rest of the prompt and the scaffold."""
    prompt_part: int
    """Tokens behind the cut that are not supervised."""
    closing: Ids
    """The last ids: terminator and what follows it; empty for a cut turn."""
    added: int
    """Added tokens in the row."""


class BatchEncoder:
    """Encodes turns in bulk; rows are equal to those of `ExactEncoder`, which does whatever has no plan."""

    def __init__(self, renderer: TurnRenderer, backend: Backend) -> None:
        self.backend = backend
        self._exact = ExactEncoder(renderer, backend)
        self._splicer = Splicer(renderer)
        self._plan_ids: dict[int, PlanIds | None] = {}
        self._end = renderer.end
        added = np.array(sorted(renderer.tokenizer.added.values()), np.int64)
        self._lowest, self._highest = int(added[0]), int(added[-1])
        self._is_added = np.zeros(self._highest + 1, bool)
        self._is_added[added] = True

    def encode(self, items: Sequence[Item]) -> list[Row | Refused]:
        """One result an item, in order."""
        texts: list[str] = []
        planned: dict[int, list[int]] = defaultdict(list)
        plans: dict[int, SplicePlan] = {}
        where: dict[int, int] = {}
        for i, (completion, turn) in enumerate(items):
            plan = self._plan(completion, turn)
            halves = plan.join(completion, turn) if plan is not None else None
            if plan is None or halves is None:
                continue
            where[i] = len(texts)
            texts += halves
            plans[id(plan)] = plan
            planned[id(plan)].append(i)
        results: list[Row | Refused | None] = [None] * len(items)
        if texts:
            ids, offsets = self.backend.encode(texts)
            added = self._added_positions(ids)
            for key, members in planned.items():
                firsts = np.array([where[i] for i in members])
                for i, row in zip(
                    members, self._rows(items, members, plans[key], firsts, ids, offsets, added), strict=True
                ):
                    results[i] = row
        return [self._exactly(item) if row is None else row for item, row in zip(items, results, strict=True)]

    def _exactly(self, item: Item) -> Row | Refused:
        try:
            return self._exact.encode(*item)
        except Refused as refused:
            return refused

    def _plan(self, completion: Completion, turn: int) -> SplicePlan | None:
        if completion.completion_token_ids is not None or not self._end.written:
            return None
        plan = self._splicer.plan(completion, turn)
        if plan is None:
            return None
        if id(plan) not in self._plan_ids:
            self._plan_ids[id(plan)] = self._learn_ids(plan)
        return plan if self._plan_ids[id(plan)] is not None else None

    def _learn_ids(self, plan: SplicePlan) -> PlanIds | None:
        try:
            row = self._exact.text_row(plan.text)
        except Refused:
            return None
        known = self._exact.literal(plan.text.tail + plan.text.scaffold)
        head = len(self.backend.encode([plan.text.head])[0])
        closing = row.ids[row.end - 1 :] if plan.text.terminated else row.ids[:0]
        added = len(self._added_positions(row.ids))
        return PlanIds(np.array(known, np.int32), row.start - head, closing, added)

    def _added_positions(self, ids: Ids) -> NDArray[np.int64]:
        near = np.flatnonzero((ids >= self._lowest) & (ids <= self._highest))
        return near[self._is_added[ids[near]]]

    def _rows(
        self,
        items: Sequence[Item],
        members: Sequence[int],
        plan: SplicePlan,
        firsts: NDArray[np.int64],
        ids: Ids,
        offsets: Offsets,
        added: NDArray[np.int64],
    ) -> list[Row | None]:
        """Rows of one plan; None where a check fails."""
        expected = self._plan_ids[id(plan)]
        assert expected is not None
        begin, cut, end = offsets[firsts], offsets[firsts + 1], offsets[firsts + 2]
        good = np.searchsorted(added, end) - np.searchsorted(added, begin) == expected.added
        known, closing = expected.known, expected.closing
        good &= end - cut >= len(known) + len(closing)
        good &= (ids.take(cut[:, None] + np.arange(len(known)), mode="clip") == known).all(axis=1)
        good &= (ids.take(end[:, None] + np.arange(-len(closing), 0), mode="clip") == closing).all(axis=1)
        start = cut - begin + expected.prompt_part
        last = end - begin - max(0, len(closing) - 1)
        return [
            self._row(items[i], plan, ids[b:e], s, f) if fine else None
            for i, fine, b, e, s, f in zip(
                members, good.tolist(), begin.tolist(), end.tolist(), start.tolist(), last.tolist(), strict=True
            )
        ]

    @staticmethod
    def _row(item: Item, plan: SplicePlan, ids: Ids, start: int, end: int) -> Row:
        completion, turn = item
        finish_reason = completion.finish_reason if turn == len(completion.messages) - 1 else "stop"
        return Row(completion.turn_id(turn), completion.line, finish_reason, plan.text.flags, ids, start, end)
