"""The mask's invariants for any conversation, on every path: any text, control tokens, tools, three spellings, cuts."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from dflash_core.completions.completion import Completion, Rejected
from dflash_core.completions.normalize import normalize
from dflash_core.recipe import TokenizationSettings
from dflash_core.shards.tokenize_file import FileTokenizer, apply_policies
from dflash_core.tokenization.encode import EncodedRow, columns_of
from dflash_core.tokenization.flags import Flag

Tokenizers = Callable[..., FileTokenizer]
FAMILIES = ("prefilled", "generated", "chatml", "tagged", "headerless", "llama", "end in next", "sentencepiece")

PIECES = st.sampled_from(
    [
        *("", " ", "\n", "x", "The answer", " is 42.", "\u00e9", "e\u0301", "\U0001f680", "\u4f60\u597d", "\u2003"),
        *("<", "|>", "<|im_end|>", "<|im_start|>assistant\n", "<think>", "</think>", "<tool_call>", "<|eot_id|>"),
        *("</s>", "<s>", "{{ x }}", "{% if %}", "\\n", "\x00", "\ufffd", "\r\n", "```py\nx\n```", "a" * 40, "1" * 20),
    ]
)
TEXTS = st.lists(PIECES, max_size=6).map("".join)


@st.composite
def conversations(draw: st.DrawFn) -> dict[str, object]:
    turns = draw(st.integers(1, 3))
    messages: list[dict[str, object]] = []
    if draw(st.booleans()):
        messages.append({"role": "system", "content": draw(TEXTS)})
    for _ in range(turns):
        messages.append({"role": "user", "content": draw(TEXTS)})
        answer: dict[str, object] = {"role": "assistant", "content": draw(TEXTS)}
        spelling = draw(st.sampled_from(["none", "reasoning_content", "reasoning", "inline"]))
        thought = draw(TEXTS)
        if spelling == "inline":
            answer["content"] = f"<think>\n{thought}\n</think>\n\n{answer['content']}"
        elif spelling != "none":
            answer[spelling] = thought
        messages.append(answer)
        if draw(st.integers(0, 3)) == 0:
            answer["tool_calls"] = [{"function": {"name": "f", "arguments": {draw(TEXTS): draw(TEXTS)}}}]
            messages.append({"role": "tool", "content": draw(TEXTS)})
    if messages[-1]["role"] == "tool":
        messages.append({"role": "assistant", "content": draw(TEXTS)})
    given: dict[str, object] = {"id": "r", "messages": messages}
    if draw(st.booleans()):
        given["tools"] = [{"name": draw(TEXTS), "parameters": {}}]
    return {**given, "finish_reason": draw(st.sampled_from(["stop", "length", None]))}


def rows_of(tokenizer: FileTokenizer, given: dict[str, object]) -> list[tuple[Completion, EncodedRow]]:
    """Every answer that can be rendered, by the fast path; the reference has to agree on each, refusals included."""
    try:
        completions = [completion for completion in normalize(given, 1) if not completion.is_empty]
    except Rejected:
        return []
    assert tokenizer.encoder is not None
    found = []
    for completion, row in zip(completions, tokenizer.encoder.encode(completions), strict=True):
        expected = tokenizer.reference.encode(completion)
        if isinstance(row, Rejected):
            assert isinstance(expected, Rejected)
            continue
        assert isinstance(expected, EncodedRow)
        assert row.ids.tolist() == expected.ids.tolist()
        assert (row.start, row.end, row.flags) == (expected.start, expected.end, expected.flags)
        found.append((completion, row))
    return found


PROPERTY = settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@PROPERTY
@given(conversations())
@pytest.mark.parametrize("family", FAMILIES)
def test_the_mask_invariants_hold_for_any_conversation(tokenizers: Tokenizers, family: str, given: dict) -> None:
    tokenizer = tokenizers(family)
    renderer = tokenizer.reference.renderer.tokenizer
    for completion, row in rows_of(tokenizer, given):
        assert 0 < row.start <= row.end <= len(row.ids)
        answer = completion.messages[-1]
        decoded = renderer.reference.decode(row.ids[row.start : row.end].tolist(), skip_special_tokens=False)
        for recorded in (answer.content, answer.reasoning or ""):
            assert _normalized(renderer, recorded.strip()) in decoded
        cut = completion.finish_reason == "length"
        if not cut:
            assert row.ids[row.end - 1] == tokenizer.reference.terminator
        specials = {renderer.added[token] for token in renderer.special}
        inside = [i for i in row.ids[row.start : row.end].tolist() if i in specials]
        assert inside == ([] if cut else [tokenizer.reference.terminator])


@PROPERTY
@given(conversations())
@pytest.mark.parametrize("family", ["prefilled", "llama", "sentencepiece"])
def test_a_cut_at_any_length_is_the_beginning_of_the_whole_row(
    tokenizers: Tokenizers, family: str, given: dict
) -> None:
    for _, row in rows_of(tokenizers(family), given):
        whole = np.zeros(len(row.ids), bool)
        whole[row.start : row.end] = True
        for longest in range(1, len(row.ids) + 2):
            cut = apply_policies(columns_of([row], longest), TokenizationSettings(max_length=longest), 1)
            mask = np.zeros(len(cut.ids), bool)
            mask[cut.start[0] : cut.end[0]] = True
            assert cut.ids.tolist() == row.ids[:longest].tolist()
            assert mask.tolist() == whole[:longest].tolist()
            lost = longest < row.end
            assert bool(cut.flags[0] & Flag.CLIPPED) == lost
            assert bool(cut.flags[0] & Flag.NO_TERMINATOR) == (lost or bool(row.flags & Flag.NO_TERMINATOR))
            assert cut.dropped[0] == (None if mask.any() else "no supervised token")


@PROPERTY
@given(conversations(), st.data())
@pytest.mark.parametrize("family", ["prefilled", "chatml", "llama"])
def test_engine_ids_are_used_untouched_and_drift_is_told_exactly(
    tokenizers: Tokenizers, family: str, given: dict, data: st.DataObject
) -> None:
    tokenizer = tokenizers(family)
    for completion, row in rows_of(tokenizer, given)[-1:]:
        if len(completion.messages) != len(given["messages"]):
            return
        prompt, answer = row.ids[: row.start].tolist(), row.ids[row.start : row.end].tolist()
        if data.draw(st.booleans()):
            place = data.draw(st.integers(0, len(answer) - 1))
            answer[place] = (answer[place] + data.draw(st.integers(1, 50))) % 256
        drifted = [*prompt, *answer] != row.ids[: row.end].tolist()
        engine = {**given, "prompt_token_ids": prompt, "completion_token_ids": answer}
        *_, (_, found) = rows_of(tokenizer, engine)
        assert found.ids.tolist() == [*prompt, *answer]
        assert (found.start, found.end) == (row.start, row.end)
        assert Flag(found.flags) & Flag.ENGINE_IDS
        assert bool(found.flags & Flag.DRIFT) == drifted
        assert bool(found.flags & Flag.NO_TERMINATOR) == (answer[-1] != tokenizer.reference.terminator)


@PROPERTY
@given(question=TEXTS, answer=TEXTS, more=st.booleans())
def test_one_row_has_one_mask_on_every_path(
    tokenizers: Tokenizers, folders: dict[str, Path], question: str, answer: str, more: bool
) -> None:
    """Spliced, rendered in full, from an engine's ids and by the template's own generation tags: nothing left out."""
    assume("think>" not in answer)  # a thought, which this template does not know
    tokenizer = tokenizers("tagged")
    theirs = PreTrainedTokenizerFast.from_pretrained(folders["tagged"])
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    messages = [*messages, *messages] if more else messages
    for completion, row in rows_of(tokenizer, {"id": "r", "messages": messages, "finish_reason": "stop"}):
        if row.flags & Flag.CONTROL_TOKENS_IN_CONTENT:
            continue  # transformers reads them as structure, which is why we do not leave masks to it
        asked = messages[: len(completion.messages)]
        tagged = theirs.apply_chat_template(asked, return_dict=True, return_assistant_tokens_mask=True, tokenize=True)
        mask = np.zeros(len(row.ids), bool)
        mask[row.start : row.end] = True
        assert row.ids.tolist() == tagged["input_ids"]
        last = tagged["assistant_masks"][: row.start].count(1)
        assert mask[row.start :].tolist() == [bool(m) for m in tagged["assistant_masks"][row.start :]]
        assert mask.any()
        assert (last > 0) == (len(asked) > 2)  # they mark earlier answers, too, which are rows of their own here
        engine = {"prompt_token_ids": row.ids[: row.start].tolist()}
        engine["completion_token_ids"] = row.ids[row.start : row.end].tolist()
        given = {"id": "r", "messages": asked, "finish_reason": "stop", **engine}
        *_, (_, again) = rows_of(tokenizer, given)
        assert (again.ids.tolist(), again.start, again.end) == (row.ids[: row.end].tolist(), row.start, row.end)
        assert not again.flags & Flag.DRIFT
        assert completion.messages[-1].content == answer


def _normalized(tokenizer, text: str) -> str:
    """What the tokenizer's own round trip makes of a text (composed characters, replaced bytes)."""
    tokenizer.reference.encode_special_tokens = True
    try:
        ids = np.array(tokenizer.reference.encode("x" + text, add_special_tokens=False).ids)
    finally:
        tokenizer.reference.encode_special_tokens = False
    return str(tokenizer.reference.decode(ids.tolist(), skip_special_tokens=False)).strip().removeprefix("x").strip()
