"""A tiny world to train in: target folder, shards in a real object store, a training set, a recipe."""

import hashlib
import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import Qwen3Config, Qwen3ForCausalLM

from dflash_core.batches.cache import RowStore, ShardRows, unpack
from dflash_core.quality.statistics import MergedStatistics, RenderedRows, file_statistics, merge_statistics
from dflash_core.quality.training_set import training_set_hash
from dflash_core.recipe import Recipe
from dflash_core.records import TrainingSet, TrainingSetPointer, TrainingSetShard, Verdict
from dflash_core.storage.store import Store
from dflash_core.tokenization.fingerprint import fingerprint
from dflash_core.tokenization.shards import SCHEMA, read_shard

VOCABULARY = 97
MASK = 96
TOKENIZATION = {"tokenization": {"min_supervised_tokens": 8}}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def shard_bytes(rows: Sequence[tuple[str, list[int], list[tuple[int, int]]]]) -> bytes:
    """An Arrow shard of (row id, token ids, supervised spans)."""
    columns: dict[str, Any] = {
        "row_id": [row_id for row_id, _, _ in rows],
        "source_line": list(range(1, len(rows) + 1)),
        "input_ids": [ids for _, ids, _ in rows],
        "loss_spans": [[{"start": a, "end": b} for a, b in spans] for _, _, spans in rows],
        "finish_reason": ["stop"] * len(rows),
        "prompt_tokens": [spans[0][0] if spans else 0 for _, _, spans in rows],
        "completion_tokens": [sum(b - a for a, b in spans) for _, _, spans in rows],
        "flags": [0] * len(rows),
    }
    arrays = [pa.array(columns[field.name]).cast(field.type) for field in SCHEMA]
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, SCHEMA) as writer:
        writer.write_batch(pa.RecordBatch.from_arrays(arrays, schema=SCHEMA))
    return bytes(sink.getvalue().to_pybytes())


def random_rows(file: int, count: int, longest: int = 60) -> list[tuple[str, list[int], list[tuple[int, int]]]]:
    """Rows of counting sequences: the next token follows from the last two, so that a drafter can learn them."""
    generator = np.random.default_rng(file)
    rows = []
    for line in range(count):
        length = int(generator.integers(24, longest))
        start, stride = (int(x) for x in generator.integers(1, 6, 2))
        ids = [(start + stride * i) % (MASK - 1) for i in range(length)]
        rows.append((f"file{file}:{line}", ids, [(int(generator.integers(2, 8)), length)]))
    return rows


def row_store(files: dict[str, list[tuple[str, list[int], list[tuple[int, int]]]]]) -> RowStore:
    """The rows of a training set without store and cache."""
    unpacked: list[dict[str, Any]] = [unpack(read_shard(shard_bytes(rows))) for rows in files.values()]
    return RowStore(list(files), [ShardRows(**arrays) for arrays in unpacked])


def put_training_set(
    store: Store,
    files: dict[str, list[tuple[str, list[int], list[tuple[int, int]]]]],
    passed: bool = True,
    fingerprint_of_set: str | None = None,
) -> TrainingSet:
    """Store shards and a training set that names them."""
    shards = []
    for partition, rows in files.items():
        body = shard_bytes(rows)
        stored = store.put(f"tokenized_shards/f/{hashlib.sha256(body).hexdigest()[:8]}.arrow", body)
        shards.append(
            TrainingSetShard(
                partition=partition,
                source_uri=f"s3://source/{partition}",
                source_etag="e",
                source_sha256="0" * 64,
                shard=stored,
                rows=len(rows),
                tokens=sum(len(ids) for _, ids, _ in rows),
                supervised_tokens=sum(b - a for _, _, spans in rows for a, b in spans),
            )
        )
    count = sum(shard.rows for shard in shards)
    frozen = TrainingSet(
        hash="",
        recipe="tiny",
        fingerprint=fingerprint_of_set or tiny_fingerprint(),
        shards=tuple(shards),
        missing=(),
        coverage=1.0,
        rows_read=count,
        rows_kept=count,
        rows_rejected=0,
        reject_reasons={},
        tokens=sum(shard.tokens for shard in shards),
        supervised_tokens=sum(shard.supervised_tokens for shard in shards),
        statistics=store.put("training_set/statistics.json", _statistics(files).model_dump_json().encode()),
        verdict=Verdict(passed=passed, reasons=() if passed else ("file1: 87 % near-empty",)),
    )
    frozen = frozen.model_copy(update={"hash": training_set_hash(frozen)})
    store.put_record(f"training_set/{frozen.hash}.json", frozen)
    store.put_record("training_set/latest.json", TrainingSetPointer(hash=frozen.hash))
    return frozen


def _statistics(files: dict[str, list[tuple[str, list[int], list[tuple[int, int]]]]]) -> MergedStatistics:
    return merge_statistics(
        file_statistics(
            partition,
            RenderedRows(
                row_ids=[row_id for row_id, _, _ in rows],
                lines=np.arange(1, len(rows) + 1),
                lengths=np.array([len(ids) for _, ids, _ in rows], dtype=np.int64),
                prompt_tokens=np.array([spans[0][0] if spans else 0 for _, _, spans in rows], dtype=np.int64),
                supervised=np.array([sum(b - a for a, b in spans) for _, _, spans in rows], dtype=np.int64),
                finish_reasons=["stop"] * len(rows),
                flags=np.zeros(len(rows), dtype=np.int64),
                text_hashes=np.arange(len(rows), dtype=np.uint64),
                dropped=[None] * len(rows),
            ),
            [],
            len(rows),
        )
        for partition, rows in files.items()
    )


def write_tokenizer(folder: Path) -> None:
    """One word a token; no text is tokenized here, but the tokenizer's identity counts."""
    Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0")).save(
        str(folder / "tokenizer.json")
    )
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": "{{ messages }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf8")


@cache
def tiny_fingerprint() -> str:
    """The tokenization fingerprint of every recipe that `make_recipe` makes."""
    with TemporaryDirectory() as folder:
        write_tokenizer(Path(folder))
        storage, source = {"bucket": "derived"}, {"bucket": "b"}
        return fingerprint(
            Recipe.model_validate(
                {"name": "tiny", "source": source, "storage": storage, "target": {"path": folder}, **TOKENIZATION}
            )
        )


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3 target with five layers."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("target")
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=5,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=256,
        initializer_range=0.2,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    write_tokenizer(folder)
    return folder


@pytest.fixture
def make_recipe(s3: Store, target_folder: Path, tmp_path: Path) -> Callable[..., Recipe]:
    """A recipe for the tiny world; keyword arguments replace settings of its training table."""

    def make(**training: Any) -> Recipe:
        settings = {
            "epochs": 2,
            "batch_rows": 4,
            "anchors": 8,
            "learning_rate": 2e-3,
            "held_out_share": 0.1,
            "validate_every_steps": 5,
            "checkpoint_every_steps": 2,
        }
        return Recipe.model_validate(
            {
                "name": "tiny",
                "source": {"bucket": s3.bucket, "prefix": "source/"},
                "storage": {"bucket": s3.bucket, "prefix": s3.prefix, "work_dir": tmp_path / "work", "downloads": 2},
                "target": {"path": target_folder, "layer_ids": (1, 3), "dtype": "float32"},
                "drafter": {"block_size": 4, "num_layers": 1, "mask_token_id": MASK, "head_dim": 16},
                "training": {**settings, **training},
                **TOKENIZATION,
            }
        )

    return make
