"""One completion -> the text of its row, in the pieces that a mask by construction needs.

The prompt is rendered as serving renders it; the turn is what the full render adds. Where template text ends and
recorded text begins is learned from the same render with a sentinel in place of the answer, never searched for in real
text. Control tokens spelled in a message are held out of the render as private characters and come back as ordinary
text.

    <|im_start|>user\\nHow many?<|im_end|>\\n<|im_start|>  head: up to the last added token behind which one may cut
    assistant\\n                                            tail: the rest of the prompt, up to the boundary
    <think>\\n\\n</think>\\n\\n                              scaffold: template text of the turn, here an empty thought
    Forty-two.<|im_end|>\\n                                recorded text, the terminator and what follows it

A `TurnText` has head, tail, scaffold and rest, which is all but the head.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from dflash_core.completions.completion import Completion, Json, Message, Rejected
from dflash_core.completions.normalize import THINK_CLOSE, THINK_OPEN
from dflash_core.errors import RecipeError
from dflash_core.tokenization.chat_template import template_message
from dflash_core.tokenization.control_tokens import ControlTokens
from dflash_core.tokenization.flags import Flag
from dflash_core.tokenization.tokenizer import ChatTokenizer

SENTINEL_THOUGHT, SENTINEL_ANSWER, SENTINEL_NEXT, SENTINEL_CALL = "Qzthoughtq", "Qzanswerq", "Qznextq", "Qzcallq"
MAX_LAYOUTS = 256
"""Remembered: one by structure of a conversation, and two long conversations with tools need not be alike."""


@dataclass(frozen=True, slots=True)
class TurnEnd:
    """How the template ends an answer."""

    terminator: str
    """The control token that ends a turn."""
    before: str
    """Template text between the answer and the terminator, usually empty."""
    after: str
    """Template text behind it, usually a newline: in the row, never supervised."""
    written: bool
    """False: the template leaves the terminator to the next message, so it is appended."""


@dataclass(frozen=True, slots=True)
class TurnLayout:
    """What the template puts around the recorded text of a turn."""

    lead: str
    """Between the prompt and the recorded text."""
    closing: str
    """Behind the recorded text."""
    prompted: bool
    """Whether the generation prompt changes the render; otherwise `lead` holds the assistant's header."""
    folds: bool
    """The template drops thoughts, so they are written into the answer as the model wrote them."""


@dataclass(frozen=True, slots=True)
class TurnText:
    """One row's text. The row is `head + rest`; `rest` starts with `tail + scaffold`."""

    row_id: str
    line: int
    finish_reason: str | None
    flags: int
    head: str
    """Up to and including the last added token of the prompt; encoding may be cut only there."""
    tail: str
    """What follows it in the prompt."""
    scaffold: str
    """Template text of the turn that nobody recorded: an empty thought, or a header."""
    scaffold_counts: bool
    """Whether the scaffold is supervised."""
    rest: str
    terminated: bool
    """The row ends in the terminator (and what follows it)."""
    protected: bool
    """Control tokens in its content are held out as private characters."""


class TurnRenderer:
    """Renders turns with one tokenizer's template.

    Raises:
        RecipeError: the template cannot render a plain exchange or marks no end of a turn.
    """

    def __init__(self, tokenizer: ChatTokenizer, *, supervise_empty_thought: bool) -> None:
        self.tokenizer = tokenizer
        self._supervise_empty_thought = supervise_empty_thought
        self._layouts: dict[tuple[object, ...], TurnLayout] = {}
        self.control = ControlTokens(tokenizer)
        self.end = self._turn_end()

    def render(self, completion: Completion) -> TurnText:
        """The text of the row.

        Raises:
            Rejected: the template does not accept it, or the boundary of the turn is not certain.
        """
        messages, tools = self.control.protect(completion.messages, completion.tools)
        protected = messages is not completion.messages
        answer, cut = messages[-1], completion.finish_reason == "length"
        layout = self._layout(messages, tools, completion.options)
        if layout.folds:
            answer = _fold(answer)
            messages = (*messages[:-1], answer)
            layout = self._layout(messages, tools, completion.options)
        prompt, boundary, full = self._renders(messages, tools, completion.options)
        added = full[boundary:]
        if not added.startswith(layout.lead) or not added.endswith(layout.closing):
            raise Rejected("boundary unstable", "the template renders this turn in another layout")
        # Templates may trim what was recorded; one that alters or drops it would train on something never said.
        if answer.content.strip() not in added or (answer.reasoning or "").strip() not in added:
            raise Rejected("the template alters the answer", "its text is not in the rendered turn")
        if answer.tool_calls and not (self._prints_calls_of_tools if tools else self._prints_calls):
            raise Rejected("the template drops tool calls", str(answer.tool_calls[0]["function"]["name"]))
        # A terminator that the next message would print is appended to the ids instead.
        text = full[: len(full) - len(layout.closing)] if cut or not self.end.written else full
        empty_thought = answer.reasoning is None and THINK_CLOSE in layout.lead
        recorded_only = layout.prompted and not empty_thought
        # A lone space in front of the answer is in its first token, as it is when the model writes it.
        scaffold = "" if recorded_only or layout.lead.isspace() else layout.lead
        edge = self._edge(prompt[:boundary])
        spelled = self.control.is_spelled(messages, completion.messages, full)
        return TurnText(
            row_id=completion.row_id,
            line=completion.line,
            finish_reason=completion.finish_reason,
            flags=_flags(completion.messages[-1], layout.lead, cut, spelled),
            head=full[:edge],
            tail=full[edge:boundary],
            scaffold=scaffold,
            scaffold_counts=layout.prompted and self._supervise_empty_thought,
            rest=text[edge:],
            terminated=not cut,
            protected=protected,
        )

    def _renders(self, messages: Sequence[Message], tools: Sequence[Json], options: str = "") -> tuple[str, int, str]:
        """(prompt, boundary in characters, full render)."""
        given = [template_message(message) for message in messages]
        template = self.tokenizer.template
        prompt = template.render(given[:-1], tools, options, add_generation_prompt=True)
        full = template.render(given, tools, options, add_generation_prompt=False)
        if full.startswith(prompt):
            return prompt, len(prompt), full
        # A scaffold that is pre-filled in the prompt and rendered otherwise in the turn. Everything before the
        # generation prompt has to be equal, or the model never saw this history.
        history = template.render(given[:-1], tools, options, add_generation_prompt=False)
        boundary = next((i for i, (a, b) in enumerate(zip(prompt, full, strict=False)) if a != b), len(full))
        if boundary < len(history) or not prompt.startswith(history):
            raise Rejected("boundary unstable", "the template renders the history otherwise once the answer is there")
        return prompt, boundary, full

    def _layout(self, messages: Sequence[Message], tools: Sequence[Json], options: str) -> TurnLayout:
        answer = messages[-1]
        ends_in_thought = not answer.content.strip() and not answer.tool_calls
        key = (
            tuple((m.role, m.reasoning is None, not m.tool_calls) for m in messages),
            not tools,
            ends_in_thought,
            options,
        )
        if key not in self._layouts:
            if len(self._layouts) >= MAX_LAYOUTS:
                del self._layouts[next(iter(self._layouts))]
            self._layouts[key] = self._learn_layout(messages, tools, options, ends_in_thought)
        return self._layouts[key]

    def _learn_layout(
        self, messages: Sequence[Message], tools: Sequence[Json], options: str, ends_in_thought: bool
    ) -> TurnLayout:
        answer = messages[-1]
        thought = None if answer.reasoning is None else SENTINEL_THOUGHT
        probe = Message("assistant", "" if ends_in_thought else SENTINEL_ANSWER, thought)
        prompt, boundary, full = self._renders([*messages[:-1], probe], tools, options)
        added = full[boundary:]
        given = [template_message(message) for message in messages[:-1]]
        prompted = prompt != self.tokenizer.template.render(given, tools, options, add_generation_prompt=False)
        if thought is not None and SENTINEL_THOUGHT not in added:
            return TurnLayout("", "", prompted, folds=True)
        first = added.find(SENTINEL_THOUGHT if thought else SENTINEL_ANSWER)
        last = SENTINEL_THOUGHT if ends_in_thought else SENTINEL_ANSWER
        if first < 0 or last not in added:
            raise Rejected("boundary unstable", "the template does not print the answer")
        return TurnLayout(added[:first], added[added.rindex(last) + len(last) :], prompted, folds=False)

    def _edge(self, prompt: str) -> int:
        """Where the prompt's last token ends behind which a text may be cut; 0 if it has none."""
        edge = 0
        for match in self.control.added.finditer(prompt) if self.control.added else ():
            edge = match.end() if match.group() in self.tokenizer.cuttable else edge
        return edge

    @cached_property
    def _prints_calls(self) -> bool:
        return self._finds_calls(())

    @cached_property
    def _prints_calls_of_tools(self) -> bool:
        return self._finds_calls(({"type": "function", "function": {"name": SENTINEL_CALL}},))

    def _finds_calls(self, tools: Sequence[Json]) -> bool:
        """Whether the template renders tool calls at all: a turn without its calls was never said."""
        call = {"type": "function", "function": {"name": SENTINEL_CALL, "arguments": {}}}
        exchange = [Message("user", SENTINEL_NEXT), Message("assistant", SENTINEL_ANSWER, None, (call,))]
        try:
            prompt, _, full = self._renders(exchange, tools)
            return full.count(SENTINEL_CALL) > prompt.count(SENTINEL_CALL)
        except Rejected:
            return True  # not with these; the row's own render decides

    def _turn_end(self) -> TurnEnd:
        exchange = [Message("user", SENTINEL_NEXT), Message("assistant", SENTINEL_ANSWER)]
        where = f"the chat template of {self.tokenizer.path}"
        try:
            _, boundary, full = self._renders(exchange, ())
            longer = self._renders([*exchange, Message("user", SENTINEL_NEXT), exchange[1]], ())[2]
        except Rejected as error:
            raise RecipeError(f"{where} cannot render a plain exchange ({error}); use the one serving uses") from None
        if SENTINEL_ANSWER not in full[boundary:]:
            raise RecipeError(f"{where} does not print the assistant's answer; use the one serving uses")
        closing = full[full.rindex(SENTINEL_ANSWER) + len(SENTINEL_ANSWER) :]
        found = self.control.added.search(closing) if self.control.added else None
        if found:
            return TurnEnd(found.group(), closing[: found.start()], closing[found.end() :], written=True)
        start = longer.index(SENTINEL_ANSWER) + len(SENTINEL_ANSWER)
        following = longer[start : longer.index(SENTINEL_NEXT, start)]
        found = self.control.added.match(following.lstrip()) if self.control.added else None
        terminator = found.group() if found else self.tokenizer.eos
        if terminator is None or terminator not in self.tokenizer.added:
            raise RecipeError(f"{where} marks no end of an answer and the tokenizer has no eos_token; set one of them")
        return TurnEnd(terminator, closing, "", written=False)


def _fold(answer: Message) -> Message:
    """The thought written into the content, as a model without a reasoning parser returns it."""
    closed = f"{THINK_OPEN}\n{answer.reasoning}\n{THINK_CLOSE}\n\n{answer.content}"
    content = closed if answer.content.strip() or answer.tool_calls else f"{THINK_OPEN}\n{answer.reasoning}"
    return answer._replace(content=content, reasoning=None)


def _flags(answer: Message, lead: str, cut: bool, spelled: bool) -> int:
    flags = Flag.CONTROL_TOKENS_IN_CONTENT if spelled else Flag(0)
    if cut:
        flags |= Flag.TRUNCATED_BY_LENGTH | Flag.NO_TERMINATOR
    if answer.reasoning is not None:
        flags |= Flag.THOUGHT
    elif THINK_CLOSE in lead:
        flags |= Flag.EMPTY_THOUGHT
    if answer.tool_calls:
        flags |= Flag.TOOL_CALLS
    if not answer.content.strip():
        flags |= Flag.EMPTY_ANSWER
        if cut and not answer.tool_calls:
            flags |= Flag.TRUNCATED_IN_THOUGHT
    return int(flags)
