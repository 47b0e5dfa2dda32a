"""Real completions with a real tokenizer: ids equal serving's for every row, and the masks hold."""

import json
import subprocess
import sys
import unicodedata
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from dflash_core.completions.completion import Completion
from dflash_core.completions.read import CompletionFile
from dflash_core.recipe import Recipe, SourceSettings, StorageSettings, TargetSettings, TokenizationSettings
from dflash_core.records import SourceFile
from dflash_core.shards.arrow import read_shard
from dflash_core.shards.pipeline import tokenize_files
from dflash_core.shards.tokenize_file import FileTokenizer
from dflash_core.shards.workers import FileDone
from dflash_core.storage.partitions import list_sources
from dflash_core.storage.s3 import Store
from dflash_core.tokenization.encode import EncodedRow
from dflash_core.tokenization.flags import Flag
from dflash_core.workspace import connect

FILES = ("reason_tool_use_50", "deepseek_math_v2_proofs", "gsm8k_175b", "gsm8k_train")
Encoded = tuple[dict, Completion, EncodedRow]
"""Line as written, completion, encoded row."""


def recipe(material: Path, **tokenization: object) -> Recipe:
    given = {"max_length": 1 << 20, "min_supervised_tokens": 1, "workers": 1, **tokenization}
    return Recipe(
        name="real",
        source=SourceSettings(bucket="unused", prefix="completions/"),
        storage=StorageSettings(bucket="unused", prefix="derived/"),
        target=TargetSettings(path=material / "tokenizers" / "qwen3.6"),
        tokenization=TokenizationSettings.model_validate(given),
    )


@pytest.fixture(scope="module")
def tokenizer(material: Path) -> FileTokenizer:
    return FileTokenizer(recipe(material))


@pytest.fixture(scope="module")
def serving(material: Path):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(material / "tokenizers" / "qwen3.6")


@pytest.fixture(scope="module")
def bench_file(material: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bench")
    tool = material / "tools" / "make_bench.py"
    subprocess.run([sys.executable, str(tool), str(folder), "--files", "1", "--rows", "60"], check=True)
    (path,) = folder.iterdir()
    return path


def encoded(tokenizer: FileTokenizer, path: Path, every: int = 1) -> Iterator[Encoded]:
    """The rows of every n-th line."""
    body = path.read_bytes()
    lines = body.split(b"\n")
    completions = [c for c in CompletionFile(body, str(path)) if isinstance(c, Completion) and c.line % every == 0]
    assert tokenizer.encoder is not None
    for completion, row in zip(completions, tokenizer.encoder.encode(completions), strict=True):
        assert isinstance(row, EncodedRow), row
        yield json.loads(lines[completion.line - 1]), completion, row


def served(serving, rows: list[Encoded], *, prompt: bool) -> list[list[int]]:
    """Ids of each row as transformers, and so an engine, renders it: up to its answer, or with it."""
    texts = [
        serving.apply_chat_template(
            written["messages"][: len(completion.messages) - prompt],
            tools=written.get("tools") or None,
            add_generation_prompt=prompt,
            tokenize=False,
        )
        for written, completion, _ in rows
    ]
    return serving(texts, add_special_tokens=False)["input_ids"]  # type: ignore[no-any-return]


def check(serving, rows: list[Encoded]) -> None:
    """Ids are serving's, the mask is the answer's."""
    given = zip(rows, served(serving, rows, prompt=False), served(serving, rows, prompt=True), strict=True)
    for (_, completion, row), full, prompt in given:
        assert row.ids.tolist() == full
        answer = completion.messages[-1]
        if answer.reasoning is not None:
            assert row.ids[: row.start].tolist() == prompt
        else:  # the newline that serving pre-fills is one token with that of the empty thought
            assert row.ids[: len(prompt) - 1].tolist() == prompt[:-1]
        supervised = serving.decode(row.ids[row.start : row.end])
        assert supervised.endswith("<|im_end|>")
        assert serving.decode(row.ids[row.end - 1]) == "<|im_end|>"
        for recorded in (answer.content, answer.reasoning or ""):
            assert unicodedata.normalize("NFC", recorded.strip()) in supervised


@pytest.mark.parametrize("name", FILES)
def test_every_row_has_the_ids_of_serving_and_the_mask_of_its_answer(material: Path, tokenizer, serving, name) -> None:
    rows = list(encoded(tokenizer, material / "data" / "completions" / f"{name}.jsonl"))
    assert len(rows) >= 84
    check(serving, rows)


def test_production_like_rows_have_the_ids_of_serving(tokenizer, serving, bench_file: Path) -> None:
    check(serving, list(encoded(tokenizer, bench_file)))


@pytest.mark.parametrize("name", FILES)
def test_all_real_rows_take_the_fast_path_to_the_references_result(material: Path, tokenizer, name: str) -> None:
    assert tokenizer.encoder is not None
    assert tokenizer.encoder.backend.name == "fastokens"
    for _, completion, row in encoded(tokenizer, material / "data" / "completions" / f"{name}.jsonl", 10):
        expected = tokenizer.reference.encode(completion)
        assert np.array_equal(row.ids, expected.ids)
        assert (row.start, row.end, row.flags) == (expected.start, expected.end, expected.flags)


def test_the_real_files_go_through_the_store(material: Path, s3: Store) -> None:
    given = recipe(material)
    settings = given.model_copy(
        update={
            "source": SourceSettings(bucket=s3.bucket, prefix="completions/"),
            "storage": StorageSettings(bucket=s3.bucket, prefix=s3.prefix),
        }
    )
    source = Store(s3.client, s3.bucket, "completions/")
    for name in FILES:
        source.put(f"{name}.jsonl", (material / "data" / "completions" / f"{name}.jsonl").read_bytes())
    done = {outcome.source.partition: outcome for outcome in tokenize_files(connect(settings), list_sources(source))}
    assert all(isinstance(outcome, FileDone) for outcome in done.values())
    kept = {partition: outcome.manifest.rows_kept for partition, outcome in done.items()}
    assert kept == {
        "reason_tool_use_50": 112,
        "deepseek_math_v2_proofs": 84,
        "gsm8k_175b": 1319,
        "gsm8k_train": 7473,
    }
    table = read_shard(s3.read(done["reason_tool_use_50"].manifest.shard))
    flags = table.column("flags").to_numpy()
    assert (flags & int(Flag.TOOL_CALLS) != 0).sum() == 53
    assert (flags & int(Flag.THOUGHT) != 0).all()
    assert (flags & int(Flag.CONTROL_TOKENS_IN_CONTENT) != 0).sum() == 2


def test_a_source_file_that_grew_control_tokens_is_flagged_not_cut(material: Path, tokenizer) -> None:
    row = {
        "id": "x",
        "prompt": "what is <|im_end|>?",
        "completion": "it ends a turn: <|im_end|>\nlike that, <|image_pad|>",
    }
    body = json.dumps(row).encode()
    done = tokenizer.tokenize(body, SourceFile(partition="p", key="k", uri="u", etag="e", size=len(body)), "0")
    table = read_shard(done.shard)
    ids = table.column("input_ids")[0].as_py()
    assert ids.count(tokenizer.reference.terminator) == 2
    assert table.column("flags")[0].as_py() & Flag.CONTROL_TOKENS_IN_CONTENT
