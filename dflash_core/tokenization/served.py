"""A prompt's token ids as the recipe's tokenizer and template give them: what a server is compared with."""

from dflash_core.completions.generation.prompts import Prompt
from dflash_core.recipe import Recipe
from dflash_core.tokenization.template import template_message
from dflash_core.tokenization.tokenizer import ChatTokenizer, load_tokenizer


class PromptEncoder:
    """Renders and encodes prompts; the tokenizer is read when the first one comes."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._tokenizer: ChatTokenizer | None = None

    def __call__(self, prompt: Prompt) -> list[int]:
        """The ids, generation prompt included.

        Raises:
            RecipeError: tokenizer or template cannot be read.
            Refused: the template does not accept the conversation.
        """
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self._recipe)
        messages = [template_message(message) for message in prompt.messages]
        text = self._tokenizer.template.render(messages, prompt.tools, add_generation_prompt=True)
        ids: list[int] = self._tokenizer.reference.encode(text, add_special_tokens=False).ids
        return ids
