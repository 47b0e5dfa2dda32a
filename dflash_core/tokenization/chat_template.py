"""The chat template, rendered exactly as serving does, without importing transformers (which brings torch along).

The environment has what transformers gives a chat template: an immutable sandbox, trimmed blocks, loop controls,
`tojson` without HTML escapes, `raise_exception`, the tokenizer's special tokens as variables, and
generation tags, which are read and ignored. Tests hold it byte-equal to transformers. The one exception is a template
that prints the time of rendering: the ids of such a row would hold for a day, so it is refused until the time is given.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from dflash_core.completions.completion import Json, Message, Rejected
from dflash_core.completions.normalize import THINK_CLOSE
from dflash_core.errors import RecipeError
from dflash_core.recipe import TemplateOption


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks what the assistant writes in some templates; rendering is the same without it."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class TemplateTexts(NamedTuple):
    """A tokenizer's chat template; some have another one that serving takes for requests with tools."""

    default: str
    for_tools: str | None = None


class ChatTemplate:
    """Compiled chat templates with the options of the recipe.

    Raises:
        RecipeError: the template does not parse, or an option is not one of its variables.
    """

    def __init__(
        self,
        texts: TemplateTexts,
        special_tokens: Mapping[str, str],
        options: Mapping[str, TemplateOption],
        where: str,
    ) -> None:
        self.texts = texts
        environment = _environment()
        try:
            trees = [environment.parse(text) for text in texts if text is not None]
            templates = [environment.from_string(text) for text in texts if text is not None]
        except jinja2.TemplateSyntaxError as error:
            raise RecipeError(f"the chat template of {where} does not parse: {error} (line {error.lineno})") from None
        self._template, self._template_for_tools = templates[0], templates[-1]
        read = (jinja2.meta.find_undeclared_variables(tree) for tree in trees)
        self._options = sorted(set[str]().union(*read) - {"messages"})
        for option in options:
            if option not in self._options:
                raise RecipeError(
                    f"tokenization.template_options.{option}: the chat template of {where} has no such option; "
                    f"it reads {', '.join(self._options)}"
                )
        self._where = where
        self._tree = trees[0]
        self._variables: dict[str, Any] = {**special_tokens, "documents": None, **options}

    @cached_property
    def tested_texts(self) -> tuple[str, ...]:
        """Texts that the template looks for in what it renders: content with one of them may render differently."""
        found: set[str] = set()
        for compare in self._tree.find_all(nodes.Compare):
            for operand in compare.ops:
                if operand.op in ("in", "notin", "eq", "ne"):
                    found.update(_texts(compare.expr), _texts(operand.expr))
        for call in self._tree.find_all(nodes.Call):
            if isinstance(call.node, nodes.Getattr) and call.node.attr not in ("strip", "lstrip", "rstrip"):
                found.update(*map(_texts, call.args))
        return tuple(sorted(found))

    @cached_property
    def other_texts(self) -> tuple[str, ...]:
        """Further texts that its expressions hold: through a variable, a list or a filter it may look for them, too."""
        held = {text for const in self._tree.find_all(nodes.Const) for text in _texts(const)}
        return tuple(sorted(held - {*self.tested_texts}))

    def render(
        self,
        messages: Sequence[Mapping[str, Json]],
        tools: Sequence[Json],
        options: str = "",
        *,
        add_generation_prompt: bool,
    ) -> str:
        """The text that serving would tokenize; `options`: of this conversation, see `Completion.options`.

        Raises:
            Rejected: the template does not accept this conversation.
            RecipeError: it prints the current time.
        """
        template = self._template_for_tools if tools else self._template
        try:
            return template.render(
                messages=messages,
                tools=list(tools) or None,
                add_generation_prompt=add_generation_prompt,
                **(self._variables | json.loads(options) if options else self._variables),
            )
        except _ClockRead:
            raise RecipeError(
                f"the chat template of {self._where} prints the time of rendering, so that ids would change from day "
                "to day; set the date of generation in tokenization.template_options (the template reads "
                f"{', '.join(self._options)}), or give a tokenization.chat_template that holds it"
            ) from None
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:
            raise Rejected("the template refuses the conversation", str(error)) from None


def template_message(message: Message) -> dict[str, Json]:
    """The message as engines hand it to a template; the thought under each of the names templates use."""
    given: dict[str, Json] = {"role": message.role, "content": message.content, **dict(message.extra)}
    if message.reasoning is not None:
        given |= {"reasoning_content": message.reasoning, "thinking": message.reasoning, "reasoning": message.reasoning}
    elif message.role == "assistant" and THINK_CLOSE in message.content:
        given["reasoning_content"] = ""  # the tag is quoted: keep the template from splitting the answer there
    if message.tool_calls:
        given["tool_calls"] = list(message.tool_calls)
    return given


def _texts(node: nodes.Node) -> list[str]:
    """What a constant holds, a list of constants included; nothing for any other node."""
    value = node.value if isinstance(node, nodes.Const) else None
    return [text for text in (value if isinstance(value, (list, tuple)) else [value]) if text and isinstance(text, str)]


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    functions: dict[str, Callable[..., Any]] = {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    environment.globals.update(functions)
    environment.filters["tojson"] = _tojson
    return environment


class _ClockRead(jinja2.TemplateError):
    """The template asked for the time."""


def _strftime_now(form: str) -> NoReturn:
    raise _ClockRead(form)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Json,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
