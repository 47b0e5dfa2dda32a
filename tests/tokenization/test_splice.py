"""A plan serves the common structures, gives the renderer's bytes, and stands aside where the template branches."""

import pytest

from dflash_core.completions.normalize import normalize
from dflash_core.tokenization.adversarial import adversarial_texts
from dflash_core.tokenization.splice import Splicer
from dflash_core.tokenization.turns import TurnRenderer

BRANCHING = """\
{%- for m in messages %}<|im_start|>{{ m.role }}
{% if 'magic' in m.content %}[{{ m.content }}]{% elif m.content.startswith('up') %}{{ m.content | upper }}{% else %}
{{- m.content }}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def renderer(load_chat, family: str, **tokenization: object) -> TurnRenderer:
    return TurnRenderer(load_chat(family, **tokenization), supervise_empty_thought=True)


def chat(question: str, answer: str, **more: object):
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer, **more}]
    return normalize({"id": "r", "messages": messages, "finish_reason": "stop"}, 1)[-1]


@pytest.mark.parametrize("family", ["prefilled", "generated", "chatml", "tagged", "headerless", "llama"])
@pytest.mark.parametrize("thought", [None, " hm\n"])
def test_spliced_text_equals_the_rendered_one(load_chat, family: str, thought: str | None) -> None:
    rendering = renderer(load_chat, family)
    splicer = Splicer(rendering)
    extra = {} if thought is None else {"reasoning_content": thought}
    joined = 0
    for text in adversarial_texts(()):
        if not text.strip():
            continue
        completion = chat(text, f"{text} and {text[::-1]}", **extra)
        plan = splicer.plan(completion)
        assert plan is not None
        halves = plan.join(completion)
        if halves is not None:
            joined += 1
            expected = rendering.render(completion)
            assert halves == (expected.head, expected.rest)
    assert joined > 300


def test_templates_that_cannot_be_cut_have_no_plan(load_chat) -> None:
    assert Splicer(renderer(load_chat, "sentencepiece")).plan(chat("q", "a")) is None


def test_a_text_on_which_the_template_branches_is_left_to_the_renderer(load_chat, tmp_path) -> None:
    template = tmp_path / "branching.jinja"
    template.write_text(BRANCHING)
    rendering = renderer(load_chat, "chatml", chat_template=template)
    splicer = Splicer(rendering)
    plan = splicer.plan(chat("q", "a"))
    assert plan is not None
    assert set(plan.guards) == {"magic", "up"}
    assert plan.join(chat("q", "some magic here")) is None
    assert plan.join(chat("update", "a")) is None
    assert plan.join(chat("", "a")) is None
    assert plan.join(chat("q", "plain")) is not None


def test_a_template_that_rewrites_text_has_no_plan(load_chat, tmp_path) -> None:
    template = tmp_path / "upper.jinja"
    template.write_text(BRANCHING.replace("{{- m.content }}", "{{- m.content | replace('x', 'y') }}"))
    assert Splicer(renderer(load_chat, "chatml", chat_template=template)).plan(chat("q", "a")) is None


HIDDEN = {
    "filter": "{{ m.content | replace('[tag]', '') }}",
    "variable": "{% set tag = '[tag]' %}{{ m.content.split(tag)[-1] }}",
    "condition": "{% set tag = '[tag]' %}{{ 'tagged ' if tag in m.content }}{{ m.content }}",
    "list": "{{ 'an exact one' if m.content in ['exact', 'x exact'] else m.content }}",
    "words": "{{ m.content if m.content.split() | length < 25 else 'long' }}",
    "lines": "{{ m.content if m.content.split('\n') | length < 25 else 'long' }}",
}


@pytest.mark.parametrize("content", HIDDEN.values(), ids=HIDDEN)
def test_no_text_is_spliced_on_which_the_template_branches_in_a_hidden_way(load_chat, tmp_path, content: str) -> None:
    template = tmp_path / "hidden.jinja"
    branching = "{% if m.role == 'user' %}" + content + "{% else %}{{ m.content }}{% endif %}"
    template.write_text(
        BRANCHING[: BRANCHING.index("{% if 'magic'")] + branching + BRANCHING.split("{% endif %}", 1)[1]
    )
    rendering = renderer(load_chat, "chatml", chat_template=template)
    splicer = Splicer(rendering)
    for question in ("q", "a [tag] b", "exact", "x exact", "word " * 30, "a\nb " * 30):
        completion = chat(question, "the answer")
        plan = splicer.plan(completion)
        halves = plan.join(completion) if plan else None
        expected = rendering.render(completion)
        assert halves in (None, (expected.head, expected.rest))
