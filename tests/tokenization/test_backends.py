"""Exactness outranks speed: a fast backend that is not exact is found out, before the run or during it."""

import logging

import pytest

from dflash_core.shards.tokenize_file import FileTokenizer
from dflash_core.tokenization import backends
from dflash_core.tokenization.adversarial import adversarial_texts
from dflash_core.tokenization.backends import FastokensBackend, HuggingFaceBackend, choose_backend, first_difference

BYTE_LEVEL = ("prefilled", "llama", "end in next")


class Wrong(FastokensBackend):
    """Right but for one word, which only some texts hold."""

    name = "wrong"
    word = "mistaken"

    def encode(self, texts, *, special_as_text=False):
        ids, offsets = super().encode(texts, special_as_text=special_as_text)
        ids = ids.copy()
        for i, text in enumerate(texts):
            if self.word in text:
                ids[offsets[i] : offsets[i + 1]][-4] += 1
        return ids, offsets


@pytest.mark.parametrize("family", BYTE_LEVEL)
def test_the_fast_backend_passes_the_gate_where_it_is_exact(load_chat, family: str) -> None:
    tokenizer = load_chat(family)
    assert choose_backend(tokenizer, "auto").name == "fastokens"
    assert choose_backend(tokenizer, "huggingface").name == "huggingface"


def test_a_wrong_backend_fails_the_gate_and_one_line_says_why(load_chat, monkeypatch, caplog) -> None:
    monkeypatch.setattr(Wrong, "word", "camelCase")
    monkeypatch.setattr(backends, "FastokensBackend", Wrong)
    with caplog.at_level(logging.WARNING):
        assert choose_backend(load_chat(), "auto").name == "huggingface"
    (line,) = caplog.messages
    assert "differs" in line
    assert "camelCase" in line


def test_a_tokenizer_the_fast_backend_cannot_load_uses_the_reference(load_chat, caplog) -> None:
    with caplog.at_level(logging.WARNING):
        assert choose_backend(load_chat("sentencepiece"), "auto").name == "huggingface"
    assert "cannot load" in caplog.text


def test_a_backend_that_is_wrong_behind_the_gate_is_caught_by_the_audit(
    make_recipe, tokenize_rows, monkeypatch, caplog
) -> None:
    rows = [{"id": f"r{i}", "prompt": f"question {i}", "completion": "fine " * 9} for i in range(20)]
    rows[13]["completion"] = "this is mistaken, sorry"
    expected = tokenize_rows(FileTokenizer(make_recipe(backend="huggingface")), rows)
    monkeypatch.setattr(backends, "FastokensBackend", Wrong)
    tokenizer = FileTokenizer(make_recipe(audit_share=1.0))
    assert tokenizer.encoder is not None
    assert tokenizer.encoder.backend.name == "wrong"
    with caplog.at_level(logging.WARNING):
        found = tokenize_rows(tokenizer, rows)
    assert found.shard == expected.shard
    assert "row r13 in line 14" in caplog.text
    assert tokenizer.encoder is None


def test_the_first_difference_is_found_in_either_reading(load_chat) -> None:
    tokenizer = load_chat()
    reference = HuggingFaceBackend(tokenizer.reference)

    class OnlyAsText(HuggingFaceBackend):
        def encode(self, texts, *, special_as_text=False):
            return super().encode(texts, special_as_text=False)

    assert first_difference(OnlyAsText(tokenizer.reference), reference, ["plain", "a <|im_end|> b"]) == "a <|im_end|> b"
    assert first_difference(reference, reference, adversarial_texts(tokenizer.added)) is None
