"""The view of a row is its stored ids and mask, whole; a row that was dropped can be looked at, too."""

import io
import json
import re
from html import unescape
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from tokenizers import Tokenizer

from dflash_core.errors import UserError
from dflash_core.recipe import Recipe, Source, Storage, Target, Tokenization
from dflash_core.storage.store import list_sources, open_stores
from dflash_core.tokenization.fingerprint import fingerprint
from dflash_core.tokenization.inspect import InspectedRow, Piece, inspect_row, pieces_of, to_html, to_terminal
from dflash_core.tokenization.pipeline import process_files
from dflash_core.tokenization.shards import read_shard

TARGET = Path(__file__).resolve().parents[2] / "demo" / "target"
TOKENIZER = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
LONG = "Four and four make eight, and eight and one make nine. " * 3


def _completion(row_id: str, answer: str, thought: str = "Let us count.") -> str:
    messages = [
        {"role": "user", "content": "How many <b>apples</b>\x1b[31m?"},
        {"role": "assistant", "content": answer, "reasoning_content": thought},
    ]
    return json.dumps({"id": row_id, "messages": messages, "finish_reason": "stop"})


@pytest.fixture(scope="module")
def recipe(module_bucket: str) -> Recipe:
    recipe = Recipe(
        name="test",
        source=Source(bucket=module_bucket, prefix="completions/"),
        storage=Storage(bucket=module_bucket, prefix="derived/"),
        target=Target(path=TARGET),
        tokenization=Tokenization(min_supervised_tokens=20),
    )
    stores = open_stores(recipe)
    lines = [_completion("q:1", LONG + "Nine."), _completion("q:2", "OK.", ""), "{ half", _completion("4", LONG)]
    stores.source.put("part one/file.jsonl", "\n".join(lines).encode())
    assert len(list(process_files(recipe, list_sources(stores.source)))) == 1
    return recipe


def _text(row: InspectedRow, supervised: bool) -> str:
    return "".join(piece.text for piece in row.pieces if piece.supervised == supervised)


def test_a_row_is_shown_as_it_is_stored(recipe: Recipe) -> None:
    row = inspect_row(recipe, "part one/file.jsonl:q:1")
    key = f"tokenized_shards/{fingerprint(recipe)}/part%20one%2Ffile.arrow"
    stored = read_shard(open_stores(recipe).derived.get(key).body).to_pylist()[0]
    assert [token for piece in row.pieces for token in piece.ids] == stored["input_ids"]
    assert (row.tokens, row.supervised) == (len(stored["input_ids"]), stored["completion_tokens"])
    assert _text(row, True) == f"<think>\nLet us count.\n</think>\n\n{LONG}Nine.<|im_end|>"
    assert _text(row, False).startswith("<|im_start|>user\nHow many <b>apples</b>")
    assert (row.line, row.finish_reason, row.dropped) == (1, "stop", None)
    assert "thought" in row.flags


@pytest.mark.parametrize(
    ("address", "row_id"),
    [
        ("part%20one%2Ffile", "q:1"),
        ("part%20one%2Ffile:1", "q:1"),
        ("part one/file.jsonl:4", "4"),
        ("part one/file:4", "4"),
        ("part one/file.jsonl:q:2", "q:2"),
        ("part%20one%2Ffile:2", "q:2"),
    ],
)
def test_rows_are_found_by_id_and_by_line(recipe: Recipe, address: str, row_id: str) -> None:
    assert inspect_row(recipe, address).row_id.startswith(row_id)


def test_a_dropped_row_is_rendered_anew_and_says_why(recipe: Recipe) -> None:
    row = inspect_row(recipe, "part%20one%2Ffile:q:2")
    assert row.dropped == "too few supervised tokens"
    assert _text(row, True) == "<think>\n\n</think>\n\nOK.<|im_end|>"
    assert "in no shard: too few supervised tokens" in to_html(row)


def test_a_rejected_row_says_why(recipe: Recipe) -> None:
    with pytest.raises(UserError, match=r"has no row '3' that can be shown: .*JSON"):
        inspect_row(recipe, "part%20one%2Ffile:3")
    with pytest.raises(
        UserError, match=r"has no row 'q:9' that can be shown; name a row by its id or its line \(from 1\)"
    ):
        inspect_row(recipe, "part%20one%2Ffile:q:9")
    with pytest.raises(UserError, match="nowhere has no shard with fingerprint"):
        inspect_row(recipe, "nowhere")
    for address, partition in (("my file", "my%20file"), ("sub/part-03:1", "sub%2Fpart-03"), ("", r"\.jsonl")):
        with pytest.raises(UserError, match=f"^{partition} has no shard with fingerprint"):
            inspect_row(recipe, address)


def test_the_terminal_gets_all_the_text_and_no_control_characters(recipe: Recipe) -> None:
    out = io.StringIO()
    row = inspect_row(recipe, "part%20one%2Ffile")
    Console(file=out, width=4000, color_system=None).print(to_terminal(row))
    assert "How many <b>apples</b>␛[31m?" in out.getvalue()
    assert f"{LONG}Nine.<|im_end|>" in out.getvalue()
    assert "\x1b" not in out.getvalue()


def test_html_colours_exactly_the_supervised_tokens_and_escapes_the_rest(recipe: Recipe) -> None:
    row = inspect_row(recipe, "part%20one%2Ffile")
    page = to_html(row)
    assert page.count('<span class="s"') + page.count('<span class="t"') == sum(p.supervised for p in row.pieces)
    assert "<b>" not in page
    shown = unescape(re.sub("<[^>]*>", "", page.partition("<pre>")[2]))
    assert "How many <b>apples</b>␛[31m?" in shown


@given(st.text(max_size=60), st.data())
def test_pieces_hold_every_id_once_and_the_decoded_text(text: str, data: st.DataObject) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    cut = data.draw(st.integers(0, len(ids)))
    mask = [place >= cut for place in range(len(ids))]
    pieces = list(pieces_of(TOKENIZER, ids, mask))
    assert [token for piece in pieces for token in piece.ids] == ids
    assert [piece.supervised for piece in pieces for _ in piece.ids] == mask
    whole = list(pieces_of(TOKENIZER, ids, [True] * len(ids)))
    assert "".join(piece.text for piece in whole) == TOKENIZER.decode(ids, skip_special_tokens=False)


def test_a_mask_that_parts_a_character_is_shown_as_it_is() -> None:
    ids = TOKENIZER.encode("🦄", add_special_tokens=False).ids
    assert len(ids) > 1, "the demo tokenizer knows this one by its bytes only"
    pieces = list(pieces_of(TOKENIZER, ids, [False] + [True] * (len(ids) - 1)))
    assert pieces[0] == Piece((ids[0],), "�", False)
    assert [token for piece in pieces[1:] for token in piece.ids] == ids[1:]
