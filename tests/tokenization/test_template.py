"""Our rendering and ids are, byte for byte, those of transformers, which serving engines use."""

import json
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from dflash_core.completions.normalize import normalize
from dflash_core.completions.record import Message, Refused
from dflash_core.errors import RecipeError
from dflash_core.tokenization.files import FileTokenizer
from dflash_core.tokenization.template import ChatTemplate, template_message
from dflash_core.tokenization.tokenizer import load_tokenizer

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
    folders: dict[str, Path], make_recipe, family: str, chat: list[Message], prompt: bool
) -> None:
    ours = load_tokenizer(make_recipe(family))
    theirs = PreTrainedTokenizerFast.from_pretrained(folders[family])
    tools = [CALL["function"]]
    messages = [template_message(message) for message in chat]
    try:
        text = theirs.apply_chat_template(messages, tools=tools, add_generation_prompt=prompt, tokenize=False)
    except Exception as error:  # noqa: BLE001 - whatever the template raises
        with pytest.raises(Refused, match=str(error)):
            ours.template.render(messages, tools, add_generation_prompt=prompt)
        return
    assert ours.template.render(messages, tools, add_generation_prompt=prompt) == text
    ids = theirs.apply_chat_template(messages, tools=tools, add_generation_prompt=prompt, return_dict=False)
    assert ours.reference.encode(text, add_special_tokens=False).ids == ids


def test_a_misspelt_template_option_is_refused_by_name(make_recipe) -> None:
    with pytest.raises(RecipeError, match=r"template_options\.enable_thinkin: .*enable_thinking"):
        load_tokenizer(make_recipe("generated", template_options={"enable_thinkin": False}))


def test_a_template_that_does_not_parse_is_named(make_recipe, tmp_path: Path) -> None:
    broken = tmp_path / "broken.jinja"
    broken.write_text("{% for m in messages %}{{ m.content }}")
    with pytest.raises(RecipeError, match="does not parse"):
        load_tokenizer(make_recipe("chatml", chat_template=broken))


def test_a_template_cannot_reach_out_of_its_sandbox() -> None:
    evil = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    with pytest.raises(Refused, match="unsafe"):
        ChatTemplate(evil, {}, {}, "x").render([], (), add_generation_prompt=False)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"tokenizer.json": None}, r"holds no tokenizer\.json"),
        ({"tokenizer.json": "{}"}, "is no tokenizer"),
        ({"tokenizer_config.json": "{}"}, "has no chat template; set tokenization.chat_template"),
        ({"tokenizer_config.json": "nonsense"}, "is no JSON"),
        (
            {
                "tokenizer_config.json": json.dumps(
                    {"chat_template": "x", "added_tokens_decoder": {"9": {"content": "q"}}}
                )
            },
            "do not belong together",
        ),
    ],
)
def test_an_unusable_folder_is_refused_in_one_sentence(
    folders: dict[str, Path], make_recipe, tmp_path: Path, change: dict[str, str | None], sentence: str
) -> None:
    for file in folders["chatml"].iterdir():
        (tmp_path / file.name).write_text(file.read_text(encoding="utf8"), encoding="utf8")
    for name, content in change.items():
        (tmp_path / name).unlink() if content is None else (tmp_path / name).write_text(content)
    with pytest.raises(RecipeError, match=sentence):
        load_tokenizer(make_recipe("chatml", tokenizer=tmp_path))


def test_a_folder_that_does_not_exist_is_named(make_recipe) -> None:
    with pytest.raises(RecipeError, match="nowhere does not exist"):
        load_tokenizer(make_recipe("chatml", tokenizer=Path("nowhere")))


def test_tokens_that_only_the_configuration_adds_are_added(folders: dict[str, Path], make_recipe, tmp_path) -> None:
    for file in folders["chatml"].iterdir():
        (tmp_path / file.name).write_text(file.read_text(encoding="utf8"), encoding="utf8")
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    number = load_tokenizer(make_recipe("chatml")).vocabulary
    config["added_tokens_decoder"] = {str(number): {"content": "<|new|>", "special": True}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(make_recipe("chatml", tokenizer=tmp_path))
    assert tokenizer.added["<|new|>"] == number
    assert "<|new|>" in tokenizer.special


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
    row = dated.reference.encode(normalize({"prompt": "q", "completion": "a"}, 1), 1)
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


def test_a_template_that_ends_no_turn_is_refused_at_the_start(make_recipe, tmp_path: Path) -> None:
    from dflash_core.tokenization.turns import TurnRenderer

    template = tmp_path / "plain.jinja"
    template.write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    tokenizer = load_tokenizer(make_recipe("chatml", chat_template=template))
    assert TurnRenderer(tokenizer, supervise_empty_thought=True).end.terminator == "<|im_end|>"  # the tokenizer's eos
    without_eos = type(tokenizer)(**{**vars(tokenizer), "eos": None})
    with pytest.raises(RecipeError, match="marks no end of an answer"):
        TurnRenderer(without_eos, supervise_empty_thought=True)
    template.write_text("{{ messages[0].content }}")
    with pytest.raises(RecipeError, match="does not print the assistant's answer"):
        TurnRenderer(load_tokenizer(make_recipe("chatml", chat_template=template)), supervise_empty_thought=True)
