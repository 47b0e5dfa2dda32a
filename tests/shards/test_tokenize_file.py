"""One file's bytes become a shard, statistics and rejects in which no row is missing."""

import gzip
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_core.errors import UnreadableFile
from dflash_core.recipe import Recipe, SourceSettings, StorageSettings, TargetSettings, TokenizationSettings
from dflash_core.records import Reject, SourceFile
from dflash_core.shards.arrow import read_shard
from dflash_core.shards.tokenize_file import FileTokenizer, TokenizedFile, apply_policies
from dflash_core.statistics.duplicates import unpack
from dflash_core.tokenization.encode import EncodedRow, RowColumns, columns_of
from dflash_core.tokenization.flags import Flag

ANSWER = "The quick brown fox jumps over the lazy dog, and the answer is 42."


def source(size: int = 1) -> SourceFile:
    return SourceFile(partition="p", key="completions/p.jsonl", uri="s3://b/completions/p.jsonl", etag="e", size=size)


def line(**row: object) -> bytes:
    return json.dumps({"prompt": "q", "completion": ANSWER, "finish_reason": "stop", **row}).encode()


def rejects(done: TokenizedFile) -> list[Reject]:
    return [Reject.model_validate_json(text) for text in done.rejects.splitlines()]


def test_rows_read_are_rows_kept_dropped_or_rejected_each_with_line_and_reason(tokenizers) -> None:
    two_turns = [
        {"role": r, "content": c} for r, c in zip(["user", "assistant"] * 2, ["q", "", "q", ANSWER], strict=True)
    ]
    body = b"\n".join(
        [
            line(id="a"),
            b"",
            b'{"half',
            line(id="b", completion=""),
            line(id="c", completion="x"),
            json.dumps({"id": "d", "messages": two_turns}).encode(),
            line(id="e", prompt="q " * 600),
        ]
    )
    done = tokenizers(min_supervised_tokens=8, max_length=400).tokenize(body, source(), "0" * 64)
    statistics = done.statistics
    assert statistics.rows_read == 8
    assert statistics.rows_kept == 2
    assert [(r.line, r.reason) for r in rejects(done)] == [
        (2, "blank line"),
        (3, "invalid JSON"),
        (4, "empty completion"),
        (5, "too few supervised tokens"),
        (6, "empty completion"),
        (7, "no supervised token"),
    ]
    assert statistics.rows_read == statistics.rows_kept + len(rejects(done))
    assert statistics.rejected == {"empty completion": 2, "blank line": 1, "invalid JSON": 1}
    assert (statistics.rows_rejected, statistics.rows_dropped) == (4, 2)
    assert statistics.rows_rendered == 4
    assert statistics.dropped == {"no supervised token": 1, "too few supervised tokens": 1}
    assert read_shard(done.shard).column("row_id").to_pylist() == ["a", "d#1"]


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.compress])
def test_compressed_files_give_the_bytes_of_plain_ones(tokenizers, pack) -> None:
    body = b"\n".join(line(id=str(i)) for i in range(5))
    plain, packed = (tokenizers().tokenize(b, source(), "0" * 64) for b in (body, pack(body)))
    assert (plain.shard, plain.rejects, plain.statistics) == (packed.shard, packed.rejects, packed.statistics)


def test_a_shard_names_where_it_comes_from(tokenizers) -> None:
    tokenizer = tokenizers()
    metadata = read_shard(tokenizer.tokenize(line(), source(), "ab" * 32).shard).schema.metadata
    assert metadata[b"fingerprint"].decode() == tokenizer.fingerprint
    assert metadata[b"source_key"] == b"completions/p.jsonl"
    assert metadata[b"source_etag"] == b"e"
    assert metadata[b"source_sha256"] == b"ab" * 32
    assert json.loads(metadata[b"counts"])["rows_kept"] == 1


@pytest.mark.parametrize(
    ("body", "reasons"),
    [
        (b"", {}),
        (b"\n\n", {"blank line": 2}),
        (b"PK\x03\x04\x00\x00\nabc", {"NUL byte": 1, "invalid JSON": 1}),
        (line(completion="") + b"\n" + line(completion="") + b"\n{", {"empty completion": 2, "invalid JSON": 1}),
        ("\ufeff".encode("utf-16-le") + line().decode().encode("utf-16-le"), {"NUL byte": 1}),
    ],
    ids=["zero bytes", "blank lines", "a zip file", "only rejects", "UTF-16"],
)
def test_a_file_without_a_row_keeps_its_reasons(tokenizers, body: bytes, reasons: dict[str, int]) -> None:
    done = tokenizers().tokenize(body, source(), "0" * 64)
    assert (done.statistics.rejected, done.statistics.dropped) == (reasons, {})
    assert (done.statistics.rows_kept, done.statistics.rows_read) == (0, sum(reasons.values()))
    assert read_shard(done.shard).num_rows == 0


def test_a_truncated_stream_fails_as_a_whole(tokenizers) -> None:
    with pytest.raises(UnreadableFile, match="truncated gzip"):
        tokenizers().tokenize(gzip.compress(line())[:-5], source(), "0" * 64)


def test_turns_all_or_last_is_the_recipes_choice(tokenizers) -> None:
    chat = [{"role": ("user", "assistant")[i % 2], "content": ANSWER} for i in range(6)]
    body = json.dumps({"id": "r", "messages": chat}).encode()
    for turns, expected in (("all", ["r#0", "r#1", "r#2"]), ("last", ["r#2"])):
        done = tokenizers(turns=turns).tokenize(body, source(), "0" * 64)
        assert read_shard(done.shard).column("row_id").to_pylist() == expected
        assert done.statistics.rows_read == len(expected)


def test_the_length_share_of_a_batch_is_seen(tokenizers) -> None:
    body = b"\n".join(line(id=str(i), finish_reason="length" if i < 7 else "stop") for i in range(20))
    statistics = tokenizers().tokenize(body, source(), "0" * 64).statistics
    assert statistics.finish_reasons == {"length": 7, "stop": 13}
    assert statistics.rows_kept == 20


def test_the_mixture_of_reasoning_spellings_is_counted_and_changes_no_id(tokenizers) -> None:
    spellings = [
        {"reasoning_content": "hm", "completion": ANSWER},
        {"reasoning": "hm", "completion": ANSWER},
        {"completion": f"<think>\nhm\n</think>\n\n{ANSWER}"},
        {"completion": f"hm\n</think>\n\n{ANSWER}"},
        {"completion": ANSWER},
    ]
    body = b"\n".join(line(id=str(i), **row) for i, row in enumerate(spellings))
    done = tokenizers().tokenize(body, source(), "0" * 64)
    counts = done.statistics.flag_counts
    assert {name: counts[name] for name in ("THOUGHT", "THOUGHT_INLINE", "THOUGHT_IN_REASONING", "EMPTY_THOUGHT")} == {
        "THOUGHT": 4,
        "THOUGHT_INLINE": 2,
        "THOUGHT_IN_REASONING": 1,
        "EMPTY_THOUGHT": 1,
    }
    ids = read_shard(done.shard).column("input_ids").to_pylist()
    assert ids[0] == ids[1] == ids[2] == ids[3] != ids[4]


def test_tools_in_any_spelling_give_equal_ids_and_broken_ones_reject_their_row_alone(tokenizers) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"z": 1, "a": 2}}}]
    given = [tools, json.dumps(tools), repr(tools), None, [], '[{"type": ', tools]
    body = b"\n".join(line(id=str(i), tools=value) for i, value in enumerate(given))
    done = tokenizers().tokenize(body, source(), "0" * 64)
    assert [(r.line, r.reason) for r in rejects(done)] == [(6, "malformed tools")]
    ids = dict(zip(*(read_shard(done.shard).column(name).to_pylist() for name in ("row_id", "input_ids")), strict=True))
    assert ids["0"] == ids["1"] == ids["2"] == ids["6"]
    assert ids["3"] == ids["4"] != ids["0"]


def test_an_opening_answer_is_context_only_and_the_run_goes_on(tokenizers) -> None:
    roles = ("assistant", "user", "assistant")
    messages = [{"role": role, "content": f"{ANSWER} {i}"} for i, role in enumerate(roles)]
    body = b"\n".join([json.dumps({"id": "r", "messages": messages}).encode(), line(id="s")])
    done = tokenizers("chatml").tokenize(body, source(), "0" * 64)
    table = read_shard(done.shard).to_pylist()
    assert [row["row_id"] for row in table] == ["r#1", "s"]
    reference = tokenizers("chatml").reference.renderer.tokenizer.reference
    (span,) = table[0]["loss_spans"]
    assert f"{ANSWER} 0" in reference.decode(table[0]["input_ids"][: span["start"]])
    assert reference.decode(table[0]["input_ids"][span["start"] : span["end"]]) == f"{ANSWER} 2"


def test_repeats_within_a_file_are_kept_or_dropped_as_the_recipe_says_and_always_counted(tokenizers) -> None:
    body = b"\n".join(line(id=str(i), completion=ANSWER * (1 + i % 2)) for i in range(5))
    kept, dropped = (tokenizers(repeats=rule).tokenize(body, source(), "0" * 64) for rule in ("keep", "drop"))
    assert (kept.statistics.rows_kept, dropped.statistics.rows_kept) == (5, 2)
    assert kept.statistics.duplicates.texts == dropped.statistics.duplicates.texts == 3
    assert (dropped.statistics.dropped, dropped.statistics.rejected) == ({"repeats an earlier row": 3}, {})
    assert read_shard(dropped.shard).column("row_id").to_pylist() == ["0", "1"]
    assert dropped.statistics.rows_rendered == 5


def test_repeats_are_found_across_the_batches_of_a_file(make_recipe, monkeypatch) -> None:
    monkeypatch.setattr("dflash_core.shards.tokenize_file.ROWS_PER_BATCH", 2)
    body = b"\n".join(line(id=str(i)) for i in range(7))
    assert FileTokenizer(make_recipe(repeats="drop")).tokenize(body, source(), "0" * 64).statistics.rows_kept == 1


def test_repeated_ids_and_texts_are_counted(tokenizers) -> None:
    body = b"\n".join([line(id="a"), line(id="a", completion=ANSWER * 2), line(id="b")])
    statistics = tokenizers().tokenize(body, source(), "0" * 64).statistics
    assert [len(set(unpack(hashes))) for hashes in (statistics.id_hashes, statistics.text_hashes)] == [2, 2]


def test_engine_ids_and_drift_are_counted(tokenizers) -> None:
    engine = {"prompt_token_ids": [5, 6], "completion_token_ids": [7, 8, 9]}
    statistics = tokenizers().tokenize(line(**engine) + b"\n" + line(), source(), "0" * 64).statistics
    flagged = [Flag(flags) for flags in statistics.flag_sets]
    assert sum(Flag.ENGINE_IDS | Flag.DRIFT in flags for flags in flagged) == 1


def test_an_engines_truncated_row_is_one_though_its_text_cannot_be_rendered(tokenizers) -> None:
    engine = {"prompt_token_ids": [5, 6], "completion_token_ids": [7, 8, 9], "finish_reason": "length"}
    middle = [{"role": role, "content": "q"} for role in ("user", "system", "user")]
    row = {"id": "1", "messages": [*middle, {"role": "assistant", "content": "cut"}], **engine}
    statistics = tokenizers().tokenize(json.dumps(row).encode(), source(), "0" * 64).statistics
    (flags,) = map(Flag, statistics.flag_sets)
    assert Flag.ENGINE_IDS | Flag.DRIFT | Flag.TRUNCATED_BY_LENGTH | Flag.NO_TERMINATOR in flags


def test_many_batches_give_the_rows_of_one(make_recipe, monkeypatch) -> None:
    body = b"\n".join(line(id=str(i), completion=ANSWER + f" {i}") for i in range(40))
    tokenizer = FileTokenizer(make_recipe())
    whole = tokenizer.tokenize(body, source(), "0" * 64)
    monkeypatch.setattr("dflash_core.shards.tokenize_file.ROWS_PER_BATCH", 7)
    parts = tokenizer.tokenize(body, source(), "0" * 64)
    assert read_shard(whole.shard).equals(read_shard(parts.shard))
    assert whole.statistics == parts.statistics


WITHOUT_TORCH = """
import sys
class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "transformers", "dagster"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, NoTorch())
from dflash_core.recipe import Recipe
from dflash_core.records import SourceFile
import dflash_core.shards.pipeline, dflash_core.shards.workers
from dflash_core.shards.tokenize_file import FileTokenizer
recipe = Recipe.model_validate_json(sys.argv[1])
source = SourceFile(partition="p", key="k", uri="u", etag="e", size=1)
print(FileTokenizer(recipe).tokenize(sys.argv[2].encode(), source, "0").statistics.rows_kept)
assert not {"torch", "transformers", "dagster"} & set(sys.modules)
"""


def test_tokenization_passes_without_torch(make_recipe) -> None:
    command = [sys.executable, "-c", WITHOUT_TORCH, make_recipe().model_dump_json(), line().decode()]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
    assert (done.stdout, done.returncode) == ("1\n", 0), done.stderr


def policed(batch: RowColumns, **tokenization: object) -> RowColumns:
    """The batch as a recipe with these keys of [tokenization] leaves it; nothing is too short by default."""
    given = {"min_supervised_tokens": 1, **tokenization}
    recipe = Recipe(
        name="x",
        source=SourceSettings(bucket="b"),
        storage=StorageSettings(bucket="derived"),
        target=TargetSettings(path=Path("x")),
        tokenization=TokenizationSettings.model_validate(given),
    )
    return apply_policies(batch, recipe.tokenization, recipe.min_supervised_tokens)


def batch(*spans: tuple[int, int, int], flags: int = 0, longest: int = 4096) -> RowColumns:
    """Rows of (length, start, end) with consecutive ids, cut at `longest`."""
    rows = [
        EncodedRow(f"r{i}", i + 1, "stop", flags, np.arange(length, dtype=np.int32) + 1000 * i, start, end)
        for i, (length, start, end) in enumerate(spans)
    ]
    return columns_of(rows, longest)


@pytest.mark.parametrize("longest", range(1, 25))
def test_a_cut_at_any_length_keeps_ids_and_mask_together_and_says_what_is_lost(longest: int) -> None:
    done = policed(batch((20, 5, 19), longest=longest), max_length=longest)
    kept = min(20, longest)
    assert done.ids.tolist() == list(range(kept))
    assert done.offsets.tolist() == [0, kept]
    assert (done.start[0], done.end[0]) == (min(5, longest), min(19, longest))
    assert done.dropped == ["no supervised token" if longest <= 5 else None]
    lost = longest < 19
    assert (Flag.NO_TERMINATOR in Flag(int(done.flags[0]))) == lost
    assert (Flag.CLIPPED in Flag(int(done.flags[0]))) == lost


def test_a_longer_row_is_dropped_where_the_recipe_says_so() -> None:
    done = policed(batch((20, 5, 19), (8, 2, 7), longest=10), max_length=10, truncation="drop")
    assert done.dropped == ["longer than max_length", None]


def test_losing_only_what_follows_the_terminator_is_no_loss() -> None:
    done = policed(batch((20, 5, 19), longest=19), max_length=19, truncation="drop")
    assert done.dropped == [None]
    assert not done.flags[0]
    assert len(done.ids) == 19


def test_short_rows_are_dropped_and_still_there_to_be_counted() -> None:
    done = policed(batch((20, 5, 8), (20, 5, 9)), min_supervised_tokens=4)
    assert done.dropped == ["too few supervised tokens", None]
    assert len(done) == 2
    assert (done.end - done.start).tolist() == [3, 4]


def test_the_default_minimum_is_two_blocks() -> None:
    done = policed(batch((99, 1, 32), (99, 1, 33)), min_supervised_tokens=None)
    assert done.dropped == ["too few supervised tokens", None]


@pytest.mark.parametrize("policy", ["keep", "reject"])
def test_thoughts_ended_by_length_follow_the_policy(policy: str) -> None:
    done = policed(batch((20, 5, 19), flags=int(Flag.TRUNCATED_IN_THOUGHT)), truncated_thinking=policy)
    assert done.dropped == [None if policy == "keep" else "truncated in the thought"]


def test_loops_are_marked() -> None:
    ids = np.array([7, 8, 9] * 60 + [1], np.int32)
    row = EncodedRow("r", 1, "stop", 0, ids, 1, len(ids))
    assert Flag(int(policed(columns_of([row], 4096)).flags[0])) & Flag.REPETITION_LOOP


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30), st.integers(1, 30)), max_size=6),
    st.integers(1, 40),
    st.sampled_from(["cut", "drop"]),
)
def test_policies_lose_no_row_and_keep_ids_and_spans_within_each_other(
    shapes: list[tuple[int, int, int]], longest: int, truncation: str
) -> None:
    rows = [(prompt + answer + tail, prompt, prompt + answer) for prompt, tail, answer in shapes]
    before = batch(*rows, longest=longest)
    done = policed(before, max_length=longest, truncation=truncation)
    assert len(done) == len(rows)
    for i, (length, _, _) in enumerate(rows):
        ids = done.ids[done.offsets[i] : done.offsets[i + 1]]
        assert ids.tolist() == [1000 * i + j for j in range(min(length, longest))]
        assert 0 <= done.start[i] <= done.end[i] <= len(ids)
        assert done.dropped[i] is not None or done.start[i] < done.end[i]


def test_a_clip_inside_a_character_or_the_terminator_is_marked(tokenizers: Callable, tokenize_rows: Callable) -> None:
    whole = tokenize_rows(
        tokenizers("chatml"), [{"id": "r", "prompt": "q", "completion": "\U0001f9d1\u200d\U0001f680 done"}]
    )
    (length,) = whole.statistics.lengths
    for longest in range(length - 12, length):
        cut = tokenize_rows(
            tokenizers("chatml", max_length=longest),
            [{"id": "r", "prompt": "q", "completion": "\U0001f9d1\u200d\U0001f680 done"}],
        )
        assert list(cut.statistics.lengths) == [longest]
        (flags,) = cut.statistics.flag_sets
        assert bool(flags & Flag.NO_TERMINATOR) == (longest < length - 1)
