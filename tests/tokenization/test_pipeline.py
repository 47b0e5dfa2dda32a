"""Files are processed side by side; one that fails or dies takes no other along; what is done is not redone."""

import json
import os
import shutil
import signal
import sys
from pathlib import Path

import psutil
import pytest

from dflash_core.errors import RecipeError, StorageError
from dflash_core.quality.training_set import freeze_training_set
from dflash_core.records import ShardManifest
from dflash_core.storage.store import Store, Stores, list_sources, open_stores
from dflash_core.tokenization import pool
from dflash_core.tokenization.fingerprint import fingerprint
from dflash_core.tokenization.objects import Names
from dflash_core.tokenization.pipeline import FileDone, FileFailed, process_files, verify_files
from dflash_core.tokenization.shards import read_shard
from dflash_core.tokenization.worker import Message

FILES, ROWS = 6, 5


def rows(name: str, count: int = ROWS) -> bytes:
    made = [{"id": f"{name}-{i}", "prompt": f"q {i}", "completion": f"the answer {name} {i}"} for i in range(count)]
    return "".join(json.dumps(row) + "\n" for row in made).encode()


@pytest.fixture
def stores(make_recipe, bucket: str) -> Stores:
    stores = open_stores(make_recipe(bucket=bucket))
    for i in range(FILES):
        stores.source.put(f"f{i}.jsonl", rows(f"f{i}"))
    return stores


def by_partition(outcomes) -> dict[str, FileDone | FileFailed]:
    return {outcome.source.partition: outcome for outcome in outcomes}


def objects(derived: Store) -> dict[str, bytes]:
    return {key: derived.get(key).body for key, _, _ in derived.list()}


@pytest.mark.parametrize("workers", [1, 2])
def test_every_file_is_done_and_every_object_is_named_by_its_manifest(make_recipe, stores, bucket, workers) -> None:
    recipe = make_recipe(bucket=bucket, workers=workers)
    done = by_partition(process_files(recipe, list_sources(stores.source)))
    assert sorted(done) == [f"f{i}" for i in range(FILES)]
    name = fingerprint(recipe)
    for partition, outcome in done.items():
        assert isinstance(outcome, FileDone)
        names = Names(name, partition)
        manifest = stores.derived.get_record(names.manifest, ShardManifest)
        assert manifest == outcome.manifest
        assert (manifest.shard.key, manifest.rejects.key, manifest.statistics.key) == (
            names.shard,
            names.rejects,
            names.statistics,
        )
        assert read_shard(stores.derived.read(manifest.shard)).num_rows == manifest.rows_kept == ROWS
        assert stores.derived.read(manifest.rejects) == b""
        assert json.loads(stores.derived.read(manifest.statistics))["rows_kept"] == ROWS


def test_any_number_of_processes_writes_the_same_bytes(make_recipe, stores, bucket) -> None:
    written = []
    for workers in (1, 2):
        list(process_files(make_recipe(bucket=bucket, workers=workers), list_sources(stores.source)))
        written.append(objects(stores.derived))
        for key in written[-1]:
            stores.derived.client.delete_object(Bucket=bucket, Key=stores.derived.prefix + key)
    assert written[0] == written[1]


def test_what_is_done_is_skipped_and_only_what_changed_is_redone(make_recipe, stores, bucket) -> None:
    recipe = make_recipe(bucket=bucket, workers=2)
    first = by_partition(process_files(recipe, list_sources(stores.source)))
    stores.source.put("f3.jsonl", rows("changed"))
    second = by_partition(process_files(recipe, list_sources(stores.source)))
    assert {p for p, outcome in second.items() if not outcome.skipped} == {"f3"}
    assert all(second[p].manifest == first[p].manifest for p in first if p != "f3")
    assert all(second[p].statistics == first[p].statistics for p in first if p != "f3")
    other = make_recipe(bucket=bucket, max_length=99)
    assert not any(outcome.skipped for outcome in process_files(other, list_sources(stores.source)))


@pytest.mark.parametrize("lost", ["manifest", "shard", "rejects", "statistics"])
def test_a_file_that_lost_any_object_is_done_again(make_recipe, stores, bucket, lost: str) -> None:
    recipe = make_recipe(bucket=bucket)
    list(process_files(recipe, list_sources(stores.source)))
    before = objects(stores.derived)
    key = getattr(Names(fingerprint(recipe), "f2"), lost)
    stores.derived.client.delete_object(Bucket=bucket, Key=stores.derived.prefix + key)
    done = by_partition(process_files(recipe, list_sources(stores.source)))
    assert [p for p, outcome in done.items() if not outcome.skipped] == ["f2"]
    assert objects(stores.derived) == before


@pytest.mark.parametrize("damaged", ["shard", "rejects"])
def test_a_file_whose_object_was_overwritten_with_as_many_bytes_is_done_again(
    make_recipe, stores, bucket, damaged: str
) -> None:
    recipe = make_recipe(bucket=bucket)
    stores.source.put("f2.jsonl", rows("f2") + b"{}\n")
    list(process_files(recipe, list_sources(stores.source)))
    before = objects(stores.derived)
    key = getattr(Names(fingerprint(recipe), "f2"), damaged)
    stores.derived.put(key, before[key][::-1])
    done = by_partition(process_files(recipe, list_sources(stores.source)))
    assert [p for p, outcome in done.items() if not outcome.skipped] == ["f2"]
    assert objects(stores.derived) == before


def test_bad_files_fail_alone_and_a_rerun_does_only_them(make_recipe, stores, bucket) -> None:
    recipe = make_recipe(bucket=bucket, workers=2)
    stores.source.put("bad.jsonl", b"{}\n")
    stores.source.put("cut.jsonl.gz", b"\x1f\x8b\x08\x00abc")
    stores.source.put("zero.jsonl", b"")
    sources = list_sources(stores.source)
    stores.source.put("f0.jsonl", rows("replaced while running"))
    stores.source.client.delete_object(Bucket=bucket, Key="completions/f1.jsonl")
    done = by_partition(process_files(recipe, sources))
    failed = {p: outcome.reason for p, outcome in done.items() if isinstance(outcome, FileFailed)}
    assert sorted(failed) == ["bad", "cut.jsonl.gz", "f0", "f1", "zero"]
    assert "none of 1 rows survives: no completion (1)" in failed["bad"]
    assert "gzip" in failed["cut.jsonl.gz"]
    assert "was replaced since it was listed" in failed["f0"]
    assert "no such object" in failed["f1"]
    assert "is empty" in failed["zero"]
    stores.source.put("bad.jsonl", rows("good"))
    again = by_partition(process_files(recipe, list_sources(stores.source)))
    assert {p for p, o in again.items() if isinstance(o, FileDone) and not o.skipped} == {"bad", "f0"}
    assert {p for p, o in again.items() if isinstance(o, FileFailed)} == {"cut.jsonl.gz", "zero"}


def test_a_wholly_bad_file_counts_in_the_gate(make_recipe, stores, bucket) -> None:
    """As a mostly bad one does: dropping every row of a file must not hide the file."""
    recipe = make_recipe(bucket=bucket, min_supervised_tokens=16)
    bad = [{"id": str(i), "prompt": "q", "completion": "OK."} for i in range(30)]
    stores.source.put("bad.jsonl", "".join(json.dumps(row) + "\n" for row in bad).encode())
    done = by_partition(process_files(recipe, list_sources(stores.source)))
    assert isinstance(done["bad"], FileFailed)
    frozen = freeze_training_set(recipe, fingerprint(recipe))
    assert "bad" in frozen.missing
    assert "bad" not in {shard.partition for shard in frozen.shards}
    assert any("at most 16 supervised tokens" in reason and "bad" in reason for reason in frozen.verdict.reasons)
    assert isinstance(by_partition(process_files(recipe, list_sources(stores.source)))["bad"], FileFailed)


def test_a_file_beyond_the_cap_is_refused_before_it_is_read(make_recipe, stores, bucket) -> None:
    source = list_sources(stores.source)[0].model_copy(update={"size": 1 << 40})
    (failed,) = process_files(make_recipe(bucket=bucket), [source])
    assert isinstance(failed, FileFailed)
    assert "split it" in failed.reason


@pytest.mark.parametrize("workers", [1, 2])
def test_an_unusable_tokenizer_stops_the_run_with_its_sentence(make_recipe, stores, bucket, tmp_path, workers) -> None:
    template = tmp_path / "x.jinja"
    template.write_text("{{ messages[0].content }}")
    with pytest.raises(RecipeError, match="does not print the assistant's answer"):
        list(
            process_files(
                make_recipe(bucket=bucket, workers=workers, chat_template=template), list_sources(stores.source)
            )
        )


def test_a_missing_bucket_stops_the_run_with_its_sentence(make_recipe, stores) -> None:
    with pytest.raises(StorageError, match="bucket 'missing-bucket' does not exist"):
        list(process_files(make_recipe(bucket="missing-bucket"), list_sources(stores.source)))


def test_verify_counts_what_tokenize_would_and_writes_nothing(make_recipe, stores, bucket) -> None:
    stores.source.put("f0.jsonl", rows("x") + b"\n{")
    stores.source.put("cut.jsonl.gz", b"\x1f\x8b\x08\x00abc")
    done = by_partition(verify_files(make_recipe(bucket=bucket), list_sources(stores.source)))
    assert isinstance(done["cut.jsonl.gz"], FileFailed)
    assert done["f0"].rows_read == ROWS + 2
    assert [(r.line, r.reason) for r in done["f0"].rejects] == [(6, "blank line"), (7, "invalid JSON")]
    assert objects(stores.derived) == {}


def slow_rows(count: int) -> bytes:
    """Rows that take the reference a while."""
    text = "the quick brown fox \u4f60\u597d " * 4000
    return b"".join(
        json.dumps({"id": str(i), "prompt": "q", "completion": text}).encode() + b"\n" for i in range(count)
    )


def signal_worker_at(partition: str, number: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Signals the worker process that is at this file, as soon as one is; the list then holds its id."""
    signalled: list[int] = []
    note = pool.WorkerPool._note

    def noting(self: pool.WorkerPool, worker: pool.Worker, message: Message) -> None:
        note(self, worker, message)
        if worker.computing == partition and worker.pid is not None and not signalled:
            signalled.append(worker.pid)
            os.kill(worker.pid, number)

    monkeypatch.setattr(pool.WorkerPool, "_note", noting)
    return signalled


def workers_of_this_process() -> list[psutil.Process]:
    nurseries = [p for p in psutil.Process().children() if "tokenization.worker" in " ".join(p.cmdline())]
    return [worker for nursery in nurseries for worker in nursery.children()]


def test_a_killed_worker_fails_the_file_it_had_begun_and_no_other(make_recipe, stores, bucket, monkeypatch) -> None:
    recipe = make_recipe(bucket=bucket, workers=2, backend="huggingface", max_length=100)
    stores.source.put("a-slow.jsonl", slow_rows(60))
    killed = signal_worker_at("a-slow", signal.SIGKILL, monkeypatch)
    done = by_partition(process_files(recipe, list_sources(stores.source)))
    assert killed
    assert len(done) == FILES + 1
    failed = {p: outcome.reason for p, outcome in done.items() if isinstance(outcome, FileFailed)}
    assert list(failed) == ["a-slow"]
    assert "worker process was killed" in failed["a-slow"]


@pytest.mark.parametrize("then", ["removed", "changed"])
def test_a_tokenizer_that_is_not_the_same_any_more_makes_no_shard_and_fails_no_other_file(
    make_recipe, stores, bucket, monkeypatch, tmp_path, folders, then: str
) -> None:
    """Whoever follows a killed worker loads the tokenizer again."""
    folder = tmp_path / "tokenizer"
    shutil.copytree(folders["prefilled"], folder)
    settings = {"workers": 2, "backend": "huggingface", "max_length": 100, "tokenizer": folder}
    recipe = make_recipe(bucket=bucket, **settings)
    name = fingerprint(recipe)
    stores.source.put("a-slow.jsonl", slow_rows(60))
    killed = signal_worker_at("a-slow", signal.SIGKILL, monkeypatch)
    loaded = pool.WorkerPool._await_nursery

    def when_loaded(self: pool.WorkerPool) -> None:
        loaded(self)
        shutil.rmtree(folder)
        if then == "changed":
            shutil.copytree(folders["generated"], folder)

    monkeypatch.setattr(pool.WorkerPool, "_await_nursery", when_loaded)
    done = by_partition(process_files(recipe, list_sources(stores.source)))
    assert killed
    assert [p for p, outcome in done.items() if isinstance(outcome, FileFailed)] == ["a-slow"]
    assert len(done) == FILES + 1
    assert {key.split("/")[1] for key in objects(stores.derived)} == {name}


def test_when_no_worker_is_left_every_file_is_told_why(make_recipe, stores, bucket, monkeypatch) -> None:
    note = pool.WorkerPool._note

    def killing(self: pool.WorkerPool, worker: pool.Worker, message: Message) -> None:
        note(self, worker, message)
        if message.kind == "ready" and worker.pid is not None:
            os.kill(worker.pid, signal.SIGKILL)

    monkeypatch.setattr(pool.WorkerPool, "_note", killing)
    done = by_partition(process_files(make_recipe(bucket=bucket, workers=2), list_sources(stores.source)))
    reasons = {p: outcome.reason for p, outcome in done.items() if isinstance(outcome, FileFailed)}
    assert reasons
    for partition, outcome in done.items():
        if partition in reasons:
            assert reasons[partition].startswith(outcome.source.uri)
            assert "killed (out of memory?)" in reasons[partition]
    assert len(done) == FILES


def test_a_worker_that_makes_no_progress_is_ended(make_recipe, stores, bucket, monkeypatch) -> None:
    monkeypatch.setattr(pool, "STALL_S", 4.0)
    recipe = make_recipe(bucket=bucket, workers=2, backend="huggingface", max_length=100)
    stores.source.put("a-slow.jsonl", slow_rows(60))
    stopped = signal_worker_at("a-slow", signal.SIGSTOP, monkeypatch)
    done = by_partition(process_files(recipe, list_sources(stores.source)))
    assert stopped
    assert "made no progress" in done["a-slow"].reason
    assert sum(isinstance(outcome, FileDone) for outcome in done.values()) == FILES


def test_no_process_outlives_the_run(make_recipe, stores, bucket) -> None:
    recipe = make_recipe(bucket=bucket, workers=2)
    running = process_files(recipe, list_sources(stores.source))
    next(running)
    workers = workers_of_this_process()
    assert workers
    running.close()
    _, alive = psutil.wait_procs(workers, timeout=10)
    assert not alive
    assert not workers_of_this_process()


ORPHAN = """
import sys
from pathlib import Path
from dflash_core.recipe import Recipe
from dflash_core.storage.store import list_sources, open_stores
from dflash_core.tokenization.pipeline import process_files
recipe = Recipe.model_validate_json(sys.argv[1])
for outcome in process_files(recipe, list_sources(open_stores(recipe).source)):
    print(outcome.source.partition, flush=True)
"""


def test_workers_end_with_a_caller_that_is_killed_and_a_rerun_finishes(make_recipe, stores, bucket) -> None:
    recipe = make_recipe(bucket=bucket, workers=2, backend="huggingface", max_length=100)
    for i in range(4):
        stores.source.put(f"slow{i}.jsonl", slow_rows(3))
    caller = psutil.Popen(
        [sys.executable, "-c", ORPHAN, recipe.model_dump_json()], stdout=-1, cwd=Path(__file__).parents[2]
    )
    caller.stdout.readline()
    family = caller.children(recursive=True)
    assert len(family) == 3
    caller.kill()
    assert not psutil.wait_procs(family, timeout=60)[1]
    done = by_partition(process_files(recipe, list_sources(stores.source)))
    assert len(done) == FILES + 4
    assert all(isinstance(outcome, FileDone) for outcome in done.values())
    assert any(outcome.skipped for outcome in done.values())


CRASH = """
import os, signal, sys
from dflash_core.recipe import Recipe
from dflash_core.storage.store import Store, list_sources, open_stores
from dflash_core.tokenization.pipeline import process_files
left, put = int(sys.argv[2]), Store.put
def crossing(self, key, body, content_type="application/octet-stream"):
    global left
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    left -= 1
    return put(self, key, body, content_type)
Store.put = crossing
recipe = Recipe.model_validate_json(sys.argv[1])
list(process_files(recipe, list_sources(open_stores(recipe).source)[:1]))
"""


@pytest.mark.parametrize("crossing", range(4))
def test_a_writer_killed_before_any_of_its_writes_leaves_nothing_that_counts(
    make_recipe, stores, bucket, crossing: int
) -> None:
    recipe = make_recipe(bucket=bucket)
    command = [sys.executable, "-c", CRASH, recipe.model_dump_json(), str(crossing)]
    assert psutil.Popen(command, cwd=Path(__file__).parents[2]).wait(60) == -signal.SIGKILL
    names = Names(fingerprint(recipe), "f0")
    assert len(objects(stores.derived)) == crossing
    assert names.manifest not in objects(stores.derived)
    (source, *_) = list_sources(stores.source)
    (done,) = process_files(recipe, [source])
    assert isinstance(done, FileDone)
    assert not done.skipped
    (again,) = process_files(recipe, [source])
    assert again.skipped
    assert len(objects(stores.derived)) == 4
