"""A tokenizer folder: the reference tokenizer (Hugging Face `tokenizers`), its chat template and its special tokens.

Read straight from the files that serving reads: tokenizer.json, tokens that only tokenizer_config.json adds, and the
template from chat_template.jinja or tokenizer_config.json. Nothing is added to a text that the template did not print:
engines tokenize a rendered chat without adding special tokens, so a BOS is there exactly if the template prints one.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from dflash_core import TOKENIZATION_VERSION
from dflash_core.completions.completion import Json
from dflash_core.errors import RecipeError
from dflash_core.recipe import Recipe, TemplateOption, TokenizationSettings, settings_hash
from dflash_core.tokenization.adversarial import AROUND, MAX_TOKENS
from dflash_core.tokenization.chat_template import ChatTemplate, TemplateTexts

if TYPE_CHECKING:  # 0.14 s for whoever needs a type or a fingerprint and never encodes: the code location
    from tokenizers import Tokenizer

TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True)
class ChatTokenizer:
    """What turns conversations into ids: shared by all rows, read once per process."""

    path: Path
    reference: "Tokenizer" = field(repr=False)
    template: ChatTemplate = field(repr=False)
    added: dict[str, int] = field(repr=False)
    """Every added token and its id."""
    special: frozenset[str] = field(repr=False)
    """Those of them that are control tokens: in the text of a message they are never taken for structure."""
    eos: str | None
    content_hash: str
    """Of all files that decide ids."""

    @cached_property
    def vocabulary(self) -> int:
        """One more than the largest id."""
        return max(self.reference.get_vocab(with_added_tokens=True).values()) + 1

    @cached_property
    def cuttable(self) -> frozenset[str]:
        """Added tokens behind which a text may be cut and its parts encoded apart, with the same ids.

        Byte-level tokenizers do not look across an added token (none of 1,400 adversarial completions differed);
        SentencePiece-style ones treat the beginning of a text in their own way, so their rows are encoded whole. Tokens
        of the template are tried first.
        """
        tokens = sorted(self.added, key=lambda token: (token not in self.template.texts.default, token))
        return frozenset(token for token in tokens[:MAX_TOKENS] if token.strip() and self._is_cuttable(token))

    def ids(self, text: str) -> list[int]:
        """The ids of a text by the reference, without added ones."""
        found: list[int] = self.reference.encode(text, add_special_tokens=False).ids
        return found

    def _is_cuttable(self, token: str) -> bool:
        return all(
            self.ids(before + token + after) == self.ids(before + token) + self.ids(after)
            for before in AROUND
            for after in (*AROUND[::-1], "\n\na", "  a")
        )


@dataclass(frozen=True)
class TokenizerFiles:
    """The folder's files as read: enough to name them, and cheap."""

    folder: Path
    serialized: str = field(repr=False)
    config: dict[str, Json] = field(repr=False)
    tokens: dict[str, str]
    template: ChatTemplate = field(repr=False)

    @cached_property
    def content_hash(self) -> str:
        """Of everything in the files that decides ids."""
        parts = (
            self.serialized,
            json.dumps(self.config.get("added_tokens_decoder"), sort_keys=True),
            json.dumps(self.tokens, sort_keys=True),
            *(text for text in self.template.texts if text is not None),
        )
        return hashlib.sha256(b"".join(hashlib.sha256(part.encode("utf8")).digest() for part in parts)).hexdigest()

    def with_options(self, options: Mapping[str, TemplateOption]) -> ChatTemplate:
        """The folder's template with other options.

        Raises:
            RecipeError: the template has not such an option.
        """
        return ChatTemplate(self.template.texts, self.tokens, options, str(self.folder))


def fingerprint(recipe: Recipe, tokenizer_hash: str | None = None) -> str:
    """One short name for everything that decides ids and masks: 16 hexadecimal digits.

    Args:
        recipe: its settings count as they say themselves.
        tokenizer_hash: `content_hash` where the tokenizer has been read already.

    Raises:
        RecipeError: the tokenizer or its chat template cannot be read.
    """
    content = tokenizer_hash or read_tokenizer_files(recipe.tokenizer_path, recipe.tokenization).content_hash
    return settings_hash(recipe.settings_for("rows"), {"code": TOKENIZATION_VERSION, "tokenizer": content})[:16]


def read_tokenizer_files(folder: Path, rules: TokenizationSettings) -> TokenizerFiles:
    """Read a tokenizer folder, with the chat template and its options that the recipe names.

    Raises:
        RecipeError: the folder, the tokenizer or its chat template is missing or malformed.
    """
    if not folder.is_dir():
        raise RecipeError(f"tokenizer folder {folder} does not exist; correct target.path or tokenization.tokenizer")
    text = _read(folder / "tokenizer.json")
    if text is None:
        raise RecipeError(f"{folder} holds no tokenizer.json; save the tokenizer there in Hugging Face form")
    config = _load_json(folder / "tokenizer_config.json") or {}
    tokens = _special_tokens(config, folder)
    texts = _template_texts(rules.chat_template, folder, config)
    template = ChatTemplate(texts, tokens, rules.template_options, str(folder))
    return TokenizerFiles(folder, text, config, tokens, template)


def load_tokenizer(folder: Path, rules: TokenizationSettings) -> ChatTokenizer:
    """Read a tokenizer folder and build the reference tokenizer.

    Raises:
        RecipeError: the folder, the tokenizer or its chat template is missing or malformed.
    """
    from tokenizers import Tokenizer

    files = read_tokenizer_files(folder, rules)
    try:
        reference = Tokenizer.from_str(files.serialized)
    except Exception as error:  # noqa: BLE001 - the library raises bare Exception
        raise RecipeError(f"{files.folder}/tokenizer.json is not a tokenizer: {error}") from None
    reference.no_truncation()
    reference.no_padding()
    _add_configured_tokens(reference, files.config, files.folder)
    added = reference.get_added_tokens_decoder()
    return ChatTokenizer(
        path=files.folder,
        reference=reference,
        template=files.template,
        added={token.content: i for i, token in added.items()},
        special=frozenset(token.content for token in added.values() if token.special),
        eos=files.tokens.get("eos_token"),
        content_hash=files.content_hash,
    )


def _template_texts(chosen: Path | None, folder: Path, config: dict[str, Json]) -> TemplateTexts:
    """As serving chooses: `default`, and `tool_use` where there are tools; a file that the recipe names is for all."""
    if chosen is not None:
        text = _read(chosen)
        if text is None:
            raise RecipeError(f"tokenization.chat_template {chosen} does not exist; give an existing Jinja file")
        return TemplateTexts(text)
    named: dict[str | None, str | None] = {}
    given = _read(folder / "chat_template.jinja")
    if given is not None:
        named = {"tool_use": _read(folder / "additional_chat_templates" / "tool_use.jinja")}
    elif isinstance(config.get("chat_template"), list):
        named = {one.get("name"): one.get("template") for one in config["chat_template"] if isinstance(one, dict)}
        given = named.get("default")
    else:
        given = config.get("chat_template")
    if not isinstance(given, str) or not given.strip():
        raise RecipeError(
            f"the tokenizer in {folder} has no chat template; set tokenization.chat_template to the one serving uses"
        )
    return TemplateTexts(given, named.get("tool_use"))


def _special_tokens(config: dict[str, Json], folder: Path) -> dict[str, str]:
    table = {**(_load_json(folder / "special_tokens_map.json") or {}), **config}
    found = {name: table.get(name) for name in TOKEN_NAMES}
    texts = {name: token.get("content") if isinstance(token, dict) else token for name, token in found.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _add_configured_tokens(reference: "Tokenizer", config: dict[str, Json], folder: Path) -> None:
    """Tokens that only tokenizer_config.json lists; engines add them, too."""
    from tokenizers import AddedToken

    known = reference.get_added_tokens_decoder()
    listed = config.get("added_tokens_decoder") or {}
    for number, entry in sorted(((int(i), entry) for i, entry in listed.items()), key=lambda item: item[0]):
        if number in known:
            continue
        flags = {k: bool(entry.get(k)) for k in ("lstrip", "rstrip", "normalized", "single_word", "special")}
        reference.add_tokens([AddedToken(entry["content"], **flags)])
        if reference.token_to_id(entry["content"]) != number:
            raise RecipeError(
                f"{folder}: tokenizer_config.json gives {entry['content']!r} the id {number}, the tokenizer gives "
                f"{reference.token_to_id(entry['content'])}; the two files do not belong together"
            )


def _load_json(path: Path) -> dict[str, Json] | None:
    text = _read(path)
    if text is None:
        return None
    try:
        table = json.loads(text)
    except ValueError as error:
        raise RecipeError(f"{path} is not JSON: {error}") from None
    if not isinstance(table, dict):
        raise RecipeError(f"{path} is not a JSON object")
    return table


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path} cannot be read: {error}") from None
