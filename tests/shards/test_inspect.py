"""The view of a row is its stored ids and mask, whole; a row that was dropped can be looked at, too."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_core.errors import UserError
from dflash_core.recipe import Recipe, SourceSettings, StorageSettings, TargetSettings, TokenizationSettings
from dflash_core.shards.arrow import read_shard
from dflash_core.shards.inspect import InspectedRow, Piece, inspect_row, pieces_of
from dflash_core.shards.pipeline import tokenize_files
from dflash_core.storage.partitions import list_sources
from dflash_core.tokenization.tokenizer import fingerprint
from dflash_core.workspace import Workspace, connect
from tests.shards.inspected import TOKENIZER

TARGET = Path(__file__).resolve().parents[2] / "demo" / "target"
LONG = "Four and four make eight, and eight and one make nine. " * 3


def _completion(row_id: str, answer: str, thought: str = "Let us count.") -> str:
    messages = [
        {"role": "user", "content": "How many <b>apples</b>\x1b[31m?"},
        {"role": "assistant", "content": answer, "reasoning_content": thought},
    ]
    return json.dumps({"id": row_id, "messages": messages, "finish_reason": "stop"})


@pytest.fixture(scope="module")
def workspace(module_bucket: str) -> Workspace:
    recipe = Recipe(
        name="test",
        source=SourceSettings(bucket=module_bucket, prefix="completions/"),
        storage=StorageSettings(bucket=module_bucket, prefix="derived/"),
        target=TargetSettings(path=TARGET),
        tokenization=TokenizationSettings(min_supervised_tokens=20),
    )
    workspace = connect(recipe)
    lines = [_completion("q:1", LONG + "Nine."), _completion("q:2", "OK.", ""), "{ half", _completion("4", LONG)]
    workspace.source.put("part one/file.jsonl", "\n".join(lines).encode())
    assert len(list(tokenize_files(workspace, list_sources(workspace.source)))) == 1
    return workspace


def _text(row: InspectedRow, supervised: bool) -> str:
    return "".join(piece.text for piece in row.pieces if piece.supervised == supervised)


def test_a_row_is_shown_as_it_is_stored(workspace: Workspace) -> None:
    row = inspect_row(workspace, "part one/file.jsonl:q:1")
    key = f"tokenized_shards/{fingerprint(workspace.recipe)}/part%20one%2Ffile.arrow"
    stored = read_shard(workspace.derived.get(key).body).to_pylist()[0]
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
def test_rows_are_found_by_id_and_by_line(workspace: Workspace, address: str, row_id: str) -> None:
    assert inspect_row(workspace, address).row_id.startswith(row_id)


def test_a_dropped_row_is_rendered_again_and_says_why(workspace: Workspace) -> None:
    row = inspect_row(workspace, "part%20one%2Ffile:q:2")
    assert row.dropped == "too few supervised tokens"
    assert _text(row, True) == "<think>\n\n</think>\n\nOK.<|im_end|>"


def test_a_rejected_row_says_why(workspace: Workspace) -> None:
    with pytest.raises(UserError, match=r"has no row '3' that can be shown: .*JSON"):
        inspect_row(workspace, "part%20one%2Ffile:3")
    with pytest.raises(
        UserError, match=r"has no row 'q:9' that can be shown; name a row by its id or its line \(from 1\)"
    ):
        inspect_row(workspace, "part%20one%2Ffile:q:9")
    with pytest.raises(UserError, match="nowhere has no shard with fingerprint"):
        inspect_row(workspace, "nowhere")
    for address, partition in (("my file", "my%20file"), ("sub/part-03:1", "sub%2Fpart-03"), ("", r"\.jsonl")):
        with pytest.raises(UserError, match=f"^{partition} has no shard with fingerprint"):
            inspect_row(workspace, address)


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
