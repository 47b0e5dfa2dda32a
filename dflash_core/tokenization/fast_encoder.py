"""Many completions at once: spliced text, one bulk encode, every row checked; the rest takes the exact path.

The checks are what makes splicing safe: a row's ids have to begin with the plan's own prompt ids behind the cut, end
in the terminator, and hold exactly as many added tokens as the template printed. One more means that a text spells
one.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dflash_core.completions.completion import Completion, Rejected
from dflash_core.tokenization.backends import Backend, Ids, Offsets
from dflash_core.tokenization.encode import EncodedRow, ExactEncoder
from dflash_core.tokenization.splice import SplicePlan, Splicer
from dflash_core.tokenization.turns import TurnRenderer


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


class FastEncoder:
    """Encodes in bulk; rows are equal to those of `ExactEncoder`, which does whatever has no plan."""

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

    def encode(self, completions: Sequence[Completion]) -> list[EncodedRow | Rejected]:
        """One result a completion, in order."""
        texts: list[str] = []
        planned: dict[int, list[int]] = defaultdict(list)
        plans: dict[int, SplicePlan] = {}
        where: dict[int, int] = {}
        for i, completion in enumerate(completions):
            plan = self._plan(completion)
            halves = plan.join(completion) if plan is not None else None
            if plan is None or halves is None:
                continue
            where[i] = len(texts)
            texts += halves
            plans[id(plan)] = plan
            planned[id(plan)].append(i)
        results: list[EncodedRow | Rejected | None] = [None] * len(completions)
        if texts:
            ids, offsets = self.backend.encode(texts)
            added = self._added_positions(ids)
            for key, members in planned.items():
                firsts = np.array([where[i] for i in members])
                rows = self._rows([completions[i] for i in members], plans[key], firsts, ids, offsets, added)
                for i, row in zip(members, rows, strict=True):
                    results[i] = row
        return [
            self._exact.encode(completion) if row is None else row
            for completion, row in zip(completions, results, strict=True)
        ]

    def _plan(self, completion: Completion) -> SplicePlan | None:
        if completion.completion_token_ids is not None or not self._end.written:
            return None
        plan = self._splicer.plan(completion)
        if plan is None:
            return None
        if id(plan) not in self._plan_ids:
            self._plan_ids[id(plan)] = self._learn_ids(plan)
        return plan if self._plan_ids[id(plan)] is not None else None

    def _learn_ids(self, plan: SplicePlan) -> PlanIds | None:
        try:
            row = self._exact.text_row(plan.text)
        except Rejected:
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
        completions: Sequence[Completion],
        plan: SplicePlan,
        firsts: NDArray[np.int64],
        ids: Ids,
        offsets: Offsets,
        added: NDArray[np.int64],
    ) -> list[EncodedRow | None]:
        """Rows of one plan, each the texts `firsts` and `firsts` + 1 of the bulk; None where a check fails."""
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
        flags = plan.text.flags
        return [
            EncodedRow(one.row_id, one.line, one.finish_reason, flags, ids[b:e], s, f) if fine else None
            for one, fine, b, e, s, f in zip(
                completions,
                good.tolist(),
                begin.tolist(),
                end.tolist(),
                start.tolist(),
                last.tolist(),
                strict=True,
            )
        ]
