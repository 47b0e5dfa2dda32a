"""A tiny world to train in: target folder, shards in a real object store, a training set, a recipe, a run."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
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

from dflash_core.batches.rows import RowStore, ShardRows, unpack
from dflash_core.errors import TrainingStopped
from dflash_core.recipe import Recipe
from dflash_core.records import DrafterCheckpoint, TrainingSet, TrainingSetPointer, TrainingSetShard, Verdict
from dflash_core.shards.arrow import SCHEMA, read_shard
from dflash_core.statistics.merge import merge_statistics
from dflash_core.statistics.statistics import MergedStatistics, file_statistics
from dflash_core.storage.layout import LATEST_TRAINING_SET, RunKeys, TrainingSetKeys
from dflash_core.storage.s3 import NOTHING_SAID, Store
from dflash_core.tokenization.encode import RowColumns
from dflash_core.tokenization.tokenizer import fingerprint
from dflash_core.training.identity import LOCAL_RUNS
from dflash_core.training.job import Job, StopRequest
from dflash_core.training.metrics import StepMetrics
from dflash_core.training.train import train
from dflash_core.training_set.freeze import training_set_hash
from dflash_core.workspace import Workspace
from tests.training.crash import Finished, train_or_die

Rows = list[tuple[str, list[int], list[tuple[int, int]]]]
"""(row id, token ids, supervised spans)"""
VOCABULARY = 97
MASK = 96
TOKENIZATION = {"tokenization": {"min_supervised_tokens": 8}}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def shard_bytes(rows: Rows) -> bytes:
    """An Arrow shard of (row id, token ids, supervised spans)."""
    table: dict[str, Any] = {
        "row_id": [row_id for row_id, _, _ in rows],
        "source_line": list(range(1, len(rows) + 1)),
        "input_ids": [ids for _, ids, _ in rows],
        "loss_spans": [[{"start": a, "end": b} for a, b in spans] for _, _, spans in rows],
        "finish_reason": ["stop"] * len(rows),
        "prompt_tokens": [spans[0][0] if spans else 0 for _, _, spans in rows],
        "completion_tokens": [sum(b - a for a, b in spans) for _, _, spans in rows],
        "flags": [0] * len(rows),
    }
    arrays = [pa.array(table[field.name]).cast(field.type) for field in SCHEMA]
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, SCHEMA) as writer:
        writer.write_batch(pa.RecordBatch.from_arrays(arrays, schema=SCHEMA))
    return bytes(sink.getvalue().to_pybytes())


def random_rows(file: int, count: int, longest: int = 60) -> Rows:
    """Rows of counting sequences: the next token follows from the last two, so that a drafter can learn them."""
    generator = np.random.default_rng(file)
    rows = []
    for line in range(count):
        length = int(generator.integers(24, longest))
        start, stride = (int(x) for x in generator.integers(1, 6, 2))
        ids = [(start + stride * i) % (MASK - 1) for i in range(length)]
        rows.append((f"file{file}:{line}", ids, [(int(generator.integers(2, 8)), length)]))
    return rows


def row_store(files: dict[str, Rows]) -> RowStore:
    """The rows of a training set without store and cache."""
    unpacked: list[dict[str, Any]] = [unpack(read_shard(shard_bytes(rows))) for rows in files.values()]
    return RowStore(list(files), [ShardRows(**arrays) for arrays in unpacked])


def put_training_set(
    store: Store,
    files: dict[str, Rows],
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
        rows_dropped=0,
        rows_rejected=0,
        drop_reasons={},
        reject_reasons={},
        tokens=sum(shard.tokens for shard in shards),
        supervised_tokens=sum(shard.supervised_tokens for shard in shards),
        statistics=store.put("training_set/statistics.json", _statistics(files).model_dump_json().encode()),
        verdict=Verdict(passed=passed, reasons=() if passed else ("file1: 87 % near-empty",)),
    )
    frozen = frozen.model_copy(update={"hash": training_set_hash(frozen)})
    store.put_record(TrainingSetKeys(frozen.hash).manifest, frozen)
    store.put_record(LATEST_TRAINING_SET, TrainingSetPointer(hash=frozen.hash))
    return frozen


def _statistics(files: dict[str, Rows]) -> MergedStatistics:
    return merge_statistics(file_statistics(name, [_columns(rows)], [], len(rows)) for name, rows in files.items())


def _columns(rows: Rows) -> RowColumns:
    """A row's spans as one of the same length."""
    start = np.array([spans[0][0] if spans else 0 for _, _, spans in rows], np.int64)
    return RowColumns(
        row_ids=[row_id for row_id, _, _ in rows],
        lines=np.arange(1, len(rows) + 1),
        finish_reasons=["stop"] * len(rows),
        flags=np.zeros(len(rows), np.int64),
        ids=np.concatenate([np.array(ids, np.int32) for _, ids, _ in rows]),
        offsets=np.cumsum([0, *(len(ids) for _, ids, _ in rows)], dtype=np.int64),
        start=start,
        end=start + np.array([sum(b - a for a, b in spans) for _, _, spans in rows], np.int64),
        dropped=[None] * len(rows),
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


def workspace_over(store: Store, recipe: Recipe) -> Workspace:
    """What `connect` makes, over a client that is there already; another one takes 0.2 s."""
    source = Store(store.client, recipe.source.bucket, recipe.source.prefix)
    derived = Store(store.client, recipe.storage.bucket, recipe.storage.prefix)
    return Workspace(recipe, NOTHING_SAID, source, derived, None)


@dataclass(frozen=True)
class World:
    """A six-step run in a place of its own."""

    recipe: Recipe
    frozen: TrainingSet
    store: Store

    def train_or_die(self, deadly: int = 0) -> Finished | None:
        return train_or_die(self.recipe, self.frozen.hash, deadly)

    def train_here(self, stop_after: int | None = None) -> tuple[DrafterCheckpoint, list[StepMetrics]]:
        request, seen = StopRequest(), list[StepMetrics]()

        def on_step(metrics: StepMetrics) -> None:
            seen.append(metrics)
            if metrics.step == stop_after:
                request.ask()

        return train(workspace_over(self.store, self.recipe), Job(self.frozen.hash), on_step, request), seen

    def stop(self, step: int) -> None:
        with pytest.raises(TrainingStopped, match="the same command continues"):
            self.train_here(step)

    def lose_in_store(self, checkpoint: str) -> None:
        """Delete what was uploaded of one checkpoint; of all for an empty name."""
        for listed in list(self.store.list(RunKeys(self.run_folder.name).checkpoints + checkpoint)):
            self.store.delete(listed.key)

    @property
    def run_folder(self) -> Path:
        (folder,) = (self.recipe.storage.work_dir / LOCAL_RUNS).iterdir()
        return folder


@pytest.fixture
def make_world(s3: Store, make_recipe: Callable[..., Recipe], tmp_path: Path) -> Callable[..., World]:
    """Worlds with 2 files x 20 rows, six steps of two micro-batches, a checkpoint after every second step."""

    def make(place: str, **training: Any) -> World:
        store = Store(s3.client, s3.bucket, f"{s3.prefix}{place}/")
        frozen = put_training_set(store, {"file0": random_rows(0, 20), "file1": random_rows(1, 20)})
        settings = {"max_steps": 6, "batch_rows": 2, "accumulation": 2, "validate_every_steps": 3, **training}
        recipe = make_recipe(**settings)
        storage = recipe.storage.model_copy(update={"work_dir": tmp_path / place, "prefix": store.prefix})
        return World(recipe.model_copy(update={"storage": storage}), frozen, store)

    return make


def flip(path: Path) -> None:
    body = bytearray(path.read_bytes())
    body[len(body) // 2] ^= 1
    path.write_bytes(body)
