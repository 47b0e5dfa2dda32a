"""Our rendering and ids are, byte for byte, those of transformers, which serving engines use."""

import json
import shutil
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from dflash_core.completions.completion import Message, Rejected
from dflash_core.completions.normalize import normalize
from dflash_core.errors import RecipeError
from dflash_core.shards.tokenize_file import FileTokenizer
from dflash_core.tokenization.chat_template import ChatTemplate, TemplateTexts, template_message
from dflash_core.tokenization.encode import EncodedRow
from dflash_core.tokenization.tokenizer import fingerprint

CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": "<b>", "n": [1, None, 2.5], "\u00e9": True}}}
PLAIN = [Message("user", " one\n"), Message("assistant", "two "), Message("user", "three")]
CHATS = {
    "plain": PLAIN,
    "answered": [*PLAIN, Message("assistant", "four")],
    "thought": [*PLAIN, Message("assistant", "four", "hm\n")],
    "thoughts": [PLAIN[0], Message("assistant", "two", "first"), PLAIN[2], Message("assistant", "four", "second")],
    "system": [Message("system", "be brief"), *PLAIN, Message("assistant", "four")],
    "tools": [PLAIN[0], Message("assistant", "", "hm", (CALL,)), Message("tool", "r"), Message("assistant", "x")],
    "system in the middle": [*PLAIN, Message("system", "x"), Message("user", "y")],
}
FAMILIES = ("prefilled", "generated", "chatml", "tagged", "headerless", "llama", "end in next", "sentencepiece")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("chat", CHATS.values(), ids=CHATS)
@pytest.mark.parametrize("prompt", [True, False], ids=["prompt", "full"])
def test_text_and_ids_equal_those_of_transformers(
    folders: dict[str, Path], load_chat, family: str, chat: list[Message], prompt: bool
) -> None:
    ours = load_chat(family)
    theirs = PreTrainedTokenizerFast.from_pretrained(folders[family])
    tools = [CALL["function"]]
    messages = [template_message(message) for message in chat]
    try:
        text = theirs.apply_chat_template(messages, tools=tools, add_generation_prompt=prompt, tokenize=False)
    except Exception as error:  # noqa: BLE001 - whatever the template raises
        with pytest.raises(Rejected, match=str(error)):
            ours.template.render(messages, tools, add_generation_prompt=prompt)
        return
    assert ours.template.render(messages, tools, add_generation_prompt=prompt) == text
    ids = theirs.apply_chat_template(messages, tools=tools, add_generation_prompt=prompt, return_dict=False)
    assert ours.reference.encode(text, add_special_tokens=False).ids == ids


WITH_TOOLS = (
    "{% for t in tools %}can {{ t.function.name }}\n{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% for c in m.tool_calls or [] %}call {{ c.function | tojson }}{% endfor %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("form", ["list", "files"])
def test_a_template_for_tools_is_taken_as_transformers_takes_it(
    folders: dict[str, Path], load_chat, make_recipe, tmp_path: Path, form: str
) -> None:
    folder = shutil.copytree(folders["chatml"], tmp_path / "two")
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    default = config.pop("chat_template")
    if form == "list":
        both = {"default": default, "tool_use": WITH_TOOLS}
        config["chat_template"] = [{"name": name, "template": text} for name, text in both.items()]
    else:
        (folder / "chat_template.jinja").write_text(default)
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "tool_use.jinja").write_text(WITH_TOOLS)
    path.write_text(json.dumps(config))
    ours, theirs = load_chat("chatml", tokenizer=folder), PreTrainedTokenizerFast.from_pretrained(folder)
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": [CALL]}]
    for tools in ((), (tool,)):
        text = theirs.apply_chat_template(messages, tools=list(tools) or None, tokenize=False)
        assert ours.template.render(messages, tools, add_generation_prompt=False) == text
        assert ("can f" in text) == bool(tools)
    encoder = FileTokenizer(make_recipe("chatml", tokenizer=folder)).reference
    row = encoder.encode(normalize({"messages": messages, "tools": [tool], "finish_reason": "tool_calls"}, 1)[0])
    assert isinstance(row, EncodedRow)
    said = encoder.renderer.tokenizer.reference.decode(row.ids[row.start : row.end], skip_special_tokens=False)
    assert said == f"call {json.dumps(CALL['function'], ensure_ascii=False)}<|im_end|>"
    before = fingerprint(make_recipe("chatml", tokenizer=folder))
    for changed in (path, *folder.glob("additional_chat_templates/*")):
        changed.write_text(changed.read_text().replace("can {{", "may {{"))
    assert fingerprint(make_recipe("chatml", tokenizer=folder)) != before


def test_a_misspelt_template_option_is_refused_by_name(load_chat) -> None:
    with pytest.raises(RecipeError, match=r"template_options\.enable_thinkin: .*enable_thinking"):
        load_chat("generated", template_options={"enable_thinkin": False})


def test_a_template_that_does_not_parse_is_named(load_chat, tmp_path: Path) -> None:
    broken = tmp_path / "broken.jinja"
    broken.write_text("{% for m in messages %}{{ m.content }}")
    with pytest.raises(RecipeError, match="does not parse"):
        load_chat("chatml", chat_template=broken)


def test_a_template_cannot_reach_out_of_its_sandbox() -> None:
    evil = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    with pytest.raises(Rejected, match="unsafe"):
        ChatTemplate(TemplateTexts(evil), {}, {}, "x").render([], (), add_generation_prompt=False)


DATED = """\
{%- if date_string is not defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}
{%- if tools %}{{ strftime_now('%H:%M') }}{% endif %}
{{- 'Today is ' + date_string }}
{%- for m in messages %}{{ '<|im_start|>' + m.role + ':' + m.content + '<|im_end|>' }}{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant:{% endif %}"""


def test_a_template_that_prints_the_date_is_refused_until_the_date_is_given(make_recipe, tmp_path: Path) -> None:
    template = tmp_path / "dated.jinja"
    template.write_text(DATED)
    with pytest.raises(RecipeError, match=r"prints the time of rendering.*template_options.*date_string"):
        FileTokenizer(make_recipe("chatml", chat_template=template))
    options = {"date_string": "26 Jul 2024"}
    dated = FileTokenizer(make_recipe("chatml", chat_template=template, template_options=options))
    row = dated.reference.encode(normalize({"prompt": "q", "completion": "a"}, 1)[0])
    text = dated.reference.renderer.tokenizer.reference.decode(row.ids.tolist(), skip_special_tokens=False)
    assert text.startswith("Today is 26 Jul 2024<|im_start|>user:q")


def test_a_row_for_which_the_template_reads_the_clock_fails_its_file(
    make_recipe, tmp_path: Path, tokenize_rows
) -> None:
    template = tmp_path / "dated.jinja"
    template.write_text(DATED)
    options = {"date_string": "26 Jul 2024"}
    dated = FileTokenizer(make_recipe("chatml", chat_template=template, template_options=options))
    with pytest.raises(RecipeError, match="prints the time of rendering"):
        tokenize_rows(dated, [{"prompt": "q", "completion": "a", "tools": [{"name": "f"}]}])
