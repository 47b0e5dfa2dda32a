"""Rendering by concatenation: ten times faster than Jinja, and never trusted on sight.

Thousands of conversations share one *shape*: the same roles in the same order, with or without thoughts, the same kind
of end, the same template options. For all of them the template prints the same texts between the recorded ones. So a
shape is learned once:

1. Render it with a sentinel in place of each recorded text ("gap"). What stands between the sentinels is the template's
   own text; the pieces and gaps in their order are the plan.
2. Templates trim. For each gap the first of `TRIMS` is taken that gives the renderer's bytes on every one of `SAMPLES`,
   texts made of the white space, braces and line ends that trims and escapes differ on. Without such a trim the shape
   has no plan.
3. Templates branch on what they find in a text ("</think>", "<tool_call>"). Every constant in the template's own source
   is tried as the text of all gaps; if joining then differs from rendering, the constant becomes a *guard*: a
   conversation with it in a text is left to the renderer. A difference that no single constant explains means no plan.

Then a row costs a few string searches and one join. What is joined is still checked after encoding (`fast_encoder`:
known ids at both ends, the number of added tokens), and a share of all rows is rendered and encoded again by the
reference (`audit_share`).

To change it: a new kind of trim goes into `TRIMS`, a new way of branching shows in `tests/tokenization/test_splice.py`,
which compares joined and rendered texts for every template family; what has no plan is slower and never wrong.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from dflash_core.completions.completion import Completion, Message, Rejected
from dflash_core.tokenization.flags import Flag
from dflash_core.tokenization.turns import TurnRenderer, TurnText

Gap = tuple[int, bool]
"""A recorded text: (message index, whether it is the thought rather than the content)."""
Pattern = tuple[tuple[str, ...], tuple[Gap, ...]]
"""Template texts and the gaps between them: `texts[0] gaps[0] texts[1] ... texts[-1]`."""
Trim = Callable[[str], str]

TRIMS: tuple[Trim, ...] = (
    str,
    str.strip,
    str.rstrip,
    str.lstrip,
    lambda text: text.strip("\n"),
    lambda text: text.lstrip("\n"),
    lambda text: text.rstrip("\n"),
)
SAMPLES = (
    "x",
    " \n\t x y \t\n ",
    "\n\nz\n\n",
    "\u2003w\u2003\x1c",
    "\u4f60\u597d {{ x }} {% y %} <b> \\n",
    "0",
    "None",
    "a\r\nb\n",
    "- item\n\n```python\nx = 1\n```",
    "q" * 5000,
    "one two\n" * 300,
)
MAX_PLANS = 256


class Shape(NamedTuple):
    """What rows share for which the template prints the same texts."""

    messages: tuple[tuple[str, bool], ...]
    """(role, has a thought) of each."""
    end: str
    """"stop", "length" or "in thought": where it was cut."""
    options: str
    """`Completion.options`."""


@dataclass(frozen=True)
class SplicePlan:
    """How the rows of one shape are joined, in two halves: they are encoded apart."""

    head: Pattern
    rest: Pattern
    trims: dict[Gap, Trim]
    guards: tuple[str, ...]
    """A text with one of these is left to the renderer."""
    text: TurnText
    """The sentinel row: everything about it but its two texts holds for every row of this shape."""

    def join(self, completion: Completion) -> tuple[str, str] | None:
        """(head, rest) of the row; None: the renderer has to do it."""
        texts: dict[Gap, str] = {}
        for gap, trim in self.trims.items():
            message = completion.messages[gap[0]]
            given = (message.reasoning or "") if gap[1] else message.content
            text = trim(given)
            if not text or text.isspace() or any(guard in given for guard in self.guards):
                return None
            texts[gap] = text
        return _join(self.head, texts), _join(self.rest, texts)


class Splicer:
    """Plans by shape, learned when a shape is met first."""

    def __init__(self, renderer: TurnRenderer) -> None:
        self._renderer = renderer
        self._plans: dict[Shape, SplicePlan | None] = {}

    def plan(self, completion: Completion) -> SplicePlan | None:
        """The plan for this completion's shape; None: it has none, or failed its test."""
        messages = completion.messages
        if completion.tools or any(m.tool_calls or m.extra for m in messages):
            return None
        cut = completion.finish_reason == "length"
        end = "stop" if not cut else "length" if messages[-1].content.strip() else "in thought"
        key = Shape(tuple((m.role, m.reasoning is not None) for m in messages), end, completion.options)
        if key not in self._plans:
            if len(self._plans) >= MAX_PLANS:
                return None
            self._plans[key] = self._learn(key)
        return self._plans[key]

    def _learn(self, shape: Shape) -> SplicePlan | None:
        sentinels: dict[Gap, str] = {(i, False): f"Qz{i}contentq" for i in range(len(shape.messages))}
        sentinels |= {(i, True): f"Qz{i}thoughtq" for i, (_, thought) in enumerate(shape.messages) if thought}
        if shape.end == "in thought":
            del sentinels[len(shape.messages) - 1, False]
        try:
            text = self._renderer.render(_conversation(shape, sentinels))
        except Rejected:
            return None
        if any(sentinel in text.tail + text.scaffold for sentinel in sentinels.values()):
            return None  # recorded text before the boundary and behind the last cut: the halves would not be alike
        if not text.rest.startswith(text.tail + text.scaffold):
            return None
        plan = SplicePlan(_split(text.head, sentinels), _split(text.rest, sentinels), {}, (), text)
        trims = self._find_trims(plan, shape, sentinels)
        return None if trims is None else self._with_guards(replace(plan, trims=trims), shape)

    def _find_trims(self, plan: SplicePlan, shape: Shape, sentinels: dict[Gap, str]) -> dict[Gap, Trim] | None:
        """For each gap the trim that gives the renderer's text on every sample; None if there is none."""
        trims: dict[Gap, Trim] = {}
        for gap in sentinels:
            rendered = []
            for sample in SAMPLES:
                text = self._render(shape, {**sentinels, gap: sample})
                if text is None:
                    return None
                rendered.append((sample, text))
            for trim in TRIMS:
                if all(
                    _join(plan.head, {**sentinels, gap: trim(sample)}) == text.head
                    and _join(plan.rest, {**sentinels, gap: trim(sample)}) == text.rest
                    for sample, text in rendered
                ):
                    trims[gap] = trim
                    break
            else:
                return None
        return trims

    def _with_guards(self, plan: SplicePlan, shape: Shape) -> SplicePlan | None:
        """Find on which of the template's own strings the render branches: those texts the plan must not touch.

        None: it branches on something else that has been met.
        """

        def differs(sample: str) -> bool:
            texts = dict.fromkeys(plan.trims, sample)
            joined, text = plan.join(_conversation(shape, texts)), self._render(shape, texts)
            return joined is not None and (text is None or joined != (text.head, text.rest))

        def matters(tested: str) -> bool:
            return any(map(differs, (tested, f"{tested} x", f"x {tested}", f"x {tested} x", f"{tested}x{tested}")))

        tokenizer = self._renderer.tokenizer
        # What the template compares with is a guard without a trial if it looks like a tag: a trial with this one
        # sample could miss how it branches. A short or plain word ("user") would turn too many rows away.
        guards = [
            tested
            for tested in tokenizer.template.tested_texts
            if (len(tested) > 2 and not tested.replace("_", "").isalnum()) or matters(tested)
        ]
        # All its other texts are tried together, and one by one only where that differs: guarding each of them would
        # cost as much as the whole row. Added tokens are found by counting ids after encoding, which is cheaper.
        others = [t for t in tokenizer.template.other_texts if not any(token in t for token in tokenizer.added)]
        if differs(" x ".join(("", *others, ""))):
            guilty = [other for other in others if matters(other)]
            if not guilty:
                return None
            guards += guilty
        return replace(plan, guards=tuple(g for g in guards if not any(token in g for token in tokenizer.added)))

    def _render(self, shape: Shape, texts: dict[Gap, str]) -> TurnText | None:
        try:
            text = self._renderer.render(_conversation(shape, texts))
        except Rejected:
            return None
        return None if text.flags & Flag.CONTROL_TOKENS_IN_CONTENT else text


def _conversation(shape: Shape, texts: dict[Gap, str]) -> Completion:
    messages = tuple(
        Message(role, texts.get((i, False), ""), texts.get((i, True)))  # type: ignore[arg-type]
        for i, (role, _) in enumerate(shape.messages)
    )
    return Completion("", 0, messages, finish_reason=None if shape.end == "stop" else "length", options=shape.options)


def _split(text: str, sentinels: dict[Gap, str]) -> Pattern:
    gaps = {sentinel: gap for gap, sentinel in sentinels.items()}
    pieces = re.split("(" + "|".join(map(re.escape, gaps)) + ")", text)
    return tuple(pieces[::2]), tuple(gaps[sentinel] for sentinel in pieces[1::2])


def _join(pattern: Pattern, texts: dict[Gap, str]) -> str:
    literals, gaps = pattern
    pieces = [literals[0]]
    for gap, literal in zip(gaps, literals[1:], strict=True):
        pieces += (texts[gap], literal)
    return "".join(pieces)
