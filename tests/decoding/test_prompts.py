"""The thinking switch changes the end of a prompt and nothing else, or says why there is none."""

from pathlib import Path

import pytest

from dflash_core.decoding.prompts import ThinkingSwitch, thinking_switch
from dflash_core.recipe import Recipe
from dflash_core.tokenization.tokenizer import load_tokenizer

REPOSITORY = Path(__file__).resolve().parents[2]
PLAIN = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


def make_recipe(template: Path | None = None) -> Recipe:
    return Recipe.model_validate(
        {
            "name": "test",
            "source": {"bucket": "b"},
            "storage": {"bucket": "derived"},
            "target": {"path": REPOSITORY / "demo/target"},
            "tokenization": {"chat_template": template},
        }
    )


def test_a_prompt_is_switched_at_its_end() -> None:
    recipe = make_recipe()
    tokenizer = load_tokenizer(recipe.tokenizer_path, recipe.tokenization)
    switch = thinking_switch(recipe.tokenization, tokenizer)
    assert isinstance(switch, ThinkingSwitch)

    def ids(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.reference.encode(text, add_special_tokens=False).ids)

    asked = "<|im_start|>user\nHow many?<|im_end|>\n<|im_start|>assistant\n"
    on, off = ids(asked), ids(asked + "<think>\n\n</think>\n\n")
    assert (switch.state(on), switch.state(off)) == ("on", "off")
    assert (switch.switched(on, "off"), switch.switched(off, "on"), switch.switched(on, "on")) == (off, on, on)
    assert switch.state(on[:-2]) is None
    assert switch.switched(on[:-2], "off") is None


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (PLAIN + PROMPT, "has no option enable_thinking or thinking"),
        ("{% if enable_thinking %}{% endif %}" + PLAIN + PROMPT, "does not change the prompt"),
        (
            "{% if enable_thinking %}<|im_start|>system\nThink.<|im_end|>{% endif %}" + PLAIN + PROMPT,
            "changes more than the end of the prompt",
        ),
    ],
)
def test_a_template_without_a_usable_switch_is_named(tmp_path: Path, template: str, reason: str) -> None:
    path = tmp_path / "template.jinja"
    path.write_text(template)
    recipe = make_recipe(path)
    switch = thinking_switch(recipe.tokenization, load_tokenizer(recipe.tokenizer_path, recipe.tokenization))
    assert isinstance(switch, str)
    assert reason in switch
