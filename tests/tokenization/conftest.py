"""Small tokenizers with the chat templates of the families met in practice, in folders as serving reads them."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from dflash_core.recipe import Recipe, SourceSettings, StorageSettings, TargetSettings, TokenizationSettings
from dflash_core.records import SourceFile
from dflash_core.shards.tokenize_file import FileTokenizer, TokenizedFile
from dflash_core.tokenization.tokenizer import ChatTokenizer, load_tokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog. Wait, let me check that again: 12 + 30 = 42, so the answer is 42.",
    "def answer(x):\n    return x * 2  # twice\n\n\nfor i in range(10):\n\tprint(answer(i))\n",
    "user assistant system think tool call function name arguments result 0123456789 {}[]()<>|/\\",
    "\u00dcber die Br\u00fccke, \u4f60\u597d\u4e16\u754c, \u041f\u0440\u0438\u0432\u0435\u0442, \U0001f642\U0001f680.",
] * 4
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

CHATML = """\
{%- for message in messages -%}
<|im_start|>{{ message['role'] }}
{{ message['content'] }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""
# Thoughts of earlier questions are dropped; the thought's opening tag is the model's own or pre-filled.
REASONING = """\
{%- if tools %}<|im_start|>system
Tools:{% for tool in tools %} {{ tool | tojson }}{% endfor %}<|im_end|>
{% endif %}
{%- set ns = namespace(asked=-1) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set ns.asked = loop.index0 %}{% endif %}{% endfor %}
{%- if ns.asked < 0 %}{{ raise_exception('no question') }}{% endif %}
{%- for message in messages %}
{%- if message.role == 'system' and not loop.first %}{{ raise_exception('system message in the middle') }}{% endif %}
{%- if message.role == 'assistant' %}
{%- set thought = message.reasoning_content or '' %}
{%- set content = message.content %}
{%- if message.reasoning_content is not string and '</think>' in content %}
{%- set thought = content.split('</think>')[0].split('<think>')[-1] %}
{%- set content = content.split('</think>')[-1] %}
{%- endif %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > ns.asked and (LAST_ALWAYS or thought) %}
{{- '<think>\\n' + thought | trim + '\\n</think>\\n\\n' }}
{%- endif %}
{{- content | trim }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>\\n' + call.function | tojson + '\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
{%- else %}
{{- '<|im_start|>' + message.role + '\\n' + message.content | trim + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}
{%- elif PREFILLED %}{{ '<think>\\n' }}{% endif %}
{%- endif %}"""
PREFILLED = REASONING.replace("LAST_ALWAYS", "true").replace("PREFILLED", "true")
GENERATED = REASONING.replace("LAST_ALWAYS", "true").replace("PREFILLED", "false")
LLAMA = """\
{{- bos_token }}
{%- for message in messages %}
{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""
SENTENCEPIECE = """\
{{- bos_token }}
{%- for message in messages %}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{%- if message['role'] == 'user' %}{{ '[INST] ' + message['content'] | trim + ' [/INST]' }}
{%- else %}{{ ' ' + message['content'] | trim + eos_token }}{% endif %}
{%- endfor %}"""
END_IN_NEXT = """\
{%- for message in messages %}
{%- if not loop.first %}<|end|>{% endif %}
{{- '<|' + message['role'] + '|>' + message['content'] }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|end|><|assistant|>' }}{% endif %}"""
HEADERLESS = CHATML[: CHATML.index("{%- if add_generation_prompt")]
TAGGED = CHATML.replace(
    "{{ message['content'] }}<|im_end|>",
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ message['content'] }}<|im_end|>{% endif %}",
)

CHATML_TOKENS = {
    "<|endoftext|>": True,
    "<|im_start|>": True,
    "<|im_end|>": True,
    "<|image_pad|>": True,
} | dict.fromkeys(("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"), False)
LLAMA_TOKENS = dict.fromkeys(("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"), True)
PHI_TOKENS = dict.fromkeys(("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"), True)


@dataclass(frozen=True)
class Family:
    """A kind of tokenizer with its template."""

    template: str
    tokens: dict[str, bool]
    """Added token -> whether it is a control token."""
    special: dict[str, str]
    sentencepiece: bool = False


FAMILIES = {
    "prefilled": Family(PREFILLED, CHATML_TOKENS, {"eos_token": "<|im_end|>"}),
    "generated": Family(GENERATED, CHATML_TOKENS, {"eos_token": "<|im_end|>"}),
    "chatml": Family(CHATML, CHATML_TOKENS, {"eos_token": "<|im_end|>"}),
    "tagged": Family(TAGGED, CHATML_TOKENS, {"eos_token": "<|im_end|>"}),
    "headerless": Family(HEADERLESS, CHATML_TOKENS, {"eos_token": "<|im_end|>"}),
    "llama": Family(LLAMA, LLAMA_TOKENS, {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}),
    "end in next": Family(END_IN_NEXT, PHI_TOKENS, {"eos_token": "<|endoftext|>"}),
    "sentencepiece": Family(
        SENTENCEPIECE, {"<s>": True, "</s>": True}, {"bos_token": "<s>", "eos_token": "</s>"}, sentencepiece=True
    ),
}


def _byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def _sentencepiece() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    alphabet = sorted(set("".join(CORPUS)) - set(" "))
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        special_tokens=["<unk>", *(f"<0x{i:02X}>" for i in range(256))],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    bytes_are_pieces = json.loads(tokenizer.to_str())
    bytes_are_pieces["added_tokens"] = [t for t in bytes_are_pieces["added_tokens"] if t["content"] == "<unk>"]
    return Tokenizer.from_str(json.dumps(bytes_are_pieces))


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tokenizer folders by family."""
    made = {}
    serialized = {False: _byte_level().to_str(), True: _sentencepiece().to_str()}
    for name, family in FAMILIES.items():
        tokenizer = Tokenizer.from_str(serialized[family.sentencepiece])
        for token, special in family.tokens.items():
            tokenizer.add_tokens([AddedToken(token, special=special, normalized=False)])
        folder = tmp_path_factory.mktemp("tokenizers") / name.replace(" ", "-")
        folder.mkdir()
        tokenizer.save(str(folder / "tokenizer.json"))
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": family.template, **family.special}
        (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf8")
        made[name] = folder
    return made


MakeRecipe = Callable[..., Recipe]


@pytest.fixture(scope="session")
def make_recipe(folders: dict[str, Path]) -> MakeRecipe:
    """`make_recipe(family, bucket=..., **keys of [tokenization])`; nothing is dropped as too short by default."""

    def make(family: str = "prefilled", bucket: str = "unused", **tokenization: object) -> Recipe:
        given = {"min_supervised_tokens": 1, "audit_share": 1.0, "workers": 1, **tokenization}
        return Recipe(
            name="test",
            source=SourceSettings(bucket=bucket, prefix="completions/"),
            storage=StorageSettings(bucket=bucket, prefix="derived/"),
            target=TargetSettings(path=folders[family]),
            tokenization=TokenizationSettings.model_validate(given),
        )

    return make


LoadChat = Callable[..., ChatTokenizer]


@pytest.fixture(scope="session")
def load_chat(make_recipe: MakeRecipe) -> LoadChat:
    """`load_chat(family, **keys of [tokenization])`: the tokenizer of such a recipe, read again each time."""

    def load(family: str = "prefilled", **tokenization: object) -> ChatTokenizer:
        recipe = make_recipe(family, **tokenization)
        return load_tokenizer(recipe.tokenizer_path, recipe.tokenization)

    return load


@pytest.fixture(scope="session")
def tokenizers(make_recipe: MakeRecipe) -> Callable[..., FileTokenizer]:
    """`tokenizers(family, **keys)`, each made once."""
    made: dict[str, FileTokenizer] = {}

    def get(family: str = "prefilled", **tokenization: object) -> FileTokenizer:
        key = repr((family, sorted(tokenization.items())))
        if key not in made:
            made[key] = FileTokenizer(make_recipe(family, **tokenization))
        return made[key]

    return get


@pytest.fixture(scope="session")
def tokenize_rows() -> Callable[[FileTokenizer, list[dict[str, object]]], TokenizedFile]:
    """`tokenize_rows(tokenizer, rows)`: rows as one file."""

    def tokenize(tokenizer: FileTokenizer, rows: list[dict[str, object]]) -> TokenizedFile:
        body = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
        source = SourceFile(partition="p", key="completions/p.jsonl", uri="s3://b/p", etag="e", size=len(body))
        return tokenizer.tokenize(body, source, "0" * 64)

    return tokenize
