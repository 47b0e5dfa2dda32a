"""Worker processes: one that dies, hangs or cannot begin takes no file of another along, and none outlives the run."""

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from dflash_core.errors import ProcessDied
from dflash_core.processes import News, Told
from dflash_core.shards import workers
from dflash_core.shards.overlap import FileFailed
from dflash_core.shards.pipeline import tokenize_files
from dflash_core.shards.workers import FileDone, Ready
from dflash_core.storage.partitions import list_sources
from dflash_core.tokenization.tokenizer import fingerprint
from dflash_core.workspace import Workspace
from tests.shards.conftest import Open
from tests.shards.files import done_again, failed, objects, rows, tokenized

FILES = 6
SLOW = {"workers": 2, "backend": "huggingface", "max_length": 100}
Heed = Callable[[workers._Pool], None]


@pytest.fixture(autouse=True)
def files(workspace: Workspace) -> None:
    for i in range(FILES):
        workspace.source.put(f"f{i}.jsonl", rows(f"f{i}"))


def slow_rows(count: int) -> bytes:
    """Rows that take the reference a while."""
    text = "the quick brown fox \u4f60\u597d " * 4000
    return b"".join(
        json.dumps({"id": str(i), "prompt": "q", "completion": text}).encode() + b"\n" for i in range(count)
    )


@pytest.fixture
def after_each_news(monkeypatch: pytest.MonkeyPatch) -> Callable[[Heed], None]:
    """`after_each_news(act)`: `act(pool)` is called whenever the pool has heeded what a worker said."""
    real = workers._Pool._heed

    def install(act: Heed) -> None:
        def heeding(pool: workers._Pool, worker: workers._Worker, news: News) -> Iterator[FileDone | FileFailed]:
            yield from real(pool, worker, news)
            act(pool)

        monkeypatch.setattr(workers._Pool, "_heed", heeding)

    return install


def signal_worker_at(pool: workers._Pool, partition: str, number: signal.Signals) -> bool:
    """Whether a worker is at this file; it is sent the signal."""
    found = [worker for worker in pool.workers if worker.at == partition]
    for worker in found:
        os.kill(worker.child.process.pid, number)
    return bool(found)


def workers_of(process: psutil.Process) -> list[psutil.Process]:
    nurseries = [child for child in process.children() if "_run_child" in " ".join(child.cmdline())]
    forks = [(nursery, fork) for nursery in nurseries for fork in nursery.children()]
    return [fork for nursery, fork in forks if fork.cmdline() == nursery.cmdline()]  # its watcher is a shell


def test_a_killed_worker_fails_the_file_it_had_begun_and_no_other(workspace_of: Open, after_each_news) -> None:
    workspace = workspace_of(**SLOW)
    workspace.source.put("a-slow.jsonl", slow_rows(60))
    killed: list[bool] = []

    def kill(pool: workers._Pool) -> None:
        if not killed and signal_worker_at(pool, "a-slow", signal.SIGKILL):
            killed.append(True)

    after_each_news(kill)
    done = tokenized(workspace)
    assert killed
    assert len(done) == FILES + 1
    assert list(failed(done)) == ["a-slow"]
    assert "its worker process was killed by SIGKILL (out of memory?); run it again" in failed(done)["a-slow"]


@pytest.mark.parametrize("then", ["removed", "changed"])
def test_a_tokenizer_that_is_not_the_same_any_more_makes_no_shard_and_fails_no_other_file(
    workspace_of: Open, after_each_news, tmp_path: Path, folders: dict[str, Path], then: str
) -> None:
    """Whoever follows a killed worker loads the tokenizer again."""
    folder = tmp_path / "tokenizer"
    shutil.copytree(folders["prefilled"], folder)
    workspace = workspace_of(**SLOW, tokenizer=folder)
    name = fingerprint(workspace.recipe)
    workspace.source.put("a-slow.jsonl", slow_rows(60))
    killed: list[bool] = []

    def kill_when_all_are_ready(pool: workers._Pool) -> None:
        if killed or not all(worker.ready for worker in pool.workers):
            return
        if signal_worker_at(pool, "a-slow", signal.SIGKILL):
            killed.append(True)
            shutil.rmtree(folder)
            if then == "changed":
                shutil.copytree(folders["generated"], folder)

    after_each_news(kill_when_all_are_ready)
    done = tokenized(workspace)
    assert killed
    assert list(failed(done)) == ["a-slow"]
    assert len(done) == FILES + 1
    assert {key.split("/")[1] for key in objects(workspace.derived)} == {name}


def test_when_no_worker_is_left_every_file_is_told_why(workspace_of: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    real = workers._Pool._heed

    def killing(pool: workers._Pool, worker: workers._Worker, news: News) -> Iterator[FileDone | FileFailed]:
        pool.may_follow = min(pool.may_follow, 2)
        yield from real(pool, worker, news)
        if isinstance(news, Told) and isinstance(news.value, Ready):
            os.kill(worker.child.process.pid, signal.SIGKILL)

    monkeypatch.setattr(workers._Pool, "_heed", killing)
    done = tokenized(workspace_of(workers=2))
    reasons = failed(done)
    assert reasons
    for partition, outcome in done.items():
        if partition in reasons:
            assert reasons[partition].startswith(outcome.source.uri)
            assert "killed by SIGKILL (out of memory?)" in reasons[partition]
    assert len(done) == FILES


def test_a_run_whose_tokenizer_is_not_loaded_when_its_nursery_is_killed_says_so(
    workspace_of: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = workers._Pool.hire

    def hire(pool: workers._Pool) -> None:
        real(pool)
        os.kill(pool.nursery.child.process.pid, signal.SIGKILL)

    monkeypatch.setattr(workers._Pool, "hire", hire)
    with pytest.raises(ProcessDied, match="the process that loads the tokenizer was killed by SIGKILL"):
        tokenized(workspace_of(workers=2))
    assert not workers_of(psutil.Process())


def test_workers_go_on_when_their_nursery_is_killed(workspace_of: Open, after_each_news) -> None:
    killed: list[psutil.Process] = []

    def kill(pool: workers._Pool) -> None:
        if not killed and all(worker.ready for worker in pool.workers):
            killed.extend(workers_of(psutil.Process()))
            os.kill(pool.nursery.child.process.pid, signal.SIGKILL)

    after_each_news(kill)
    done = tokenized(workspace_of(workers=2))
    assert len(killed) == 2
    assert len(done) == FILES
    assert not failed(done)
    assert not psutil.wait_procs(killed, timeout=10)[1]


def test_a_worker_that_makes_no_progress_is_ended(
    workspace_of: Open, after_each_news, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace = workspace_of(**SLOW)
    workspace.source.put("a-slow.jsonl", slow_rows(60))
    stopped: list[bool] = []

    def stop(pool: workers._Pool) -> None:
        if not stopped and signal_worker_at(pool, "a-slow", signal.SIGSTOP):
            stopped.append(True)
            monkeypatch.setattr(workers, "STALL_S", 4.0)

    after_each_news(stop)
    done = tokenized(workspace)
    assert stopped
    assert "made no progress" in failed(done)["a-slow"]
    assert sum(isinstance(outcome, FileDone) for outcome in done.values()) == FILES


def test_no_process_outlives_the_run(workspace_of: Open) -> None:
    workspace = workspace_of(workers=2)
    running = tokenize_files(workspace, list_sources(workspace.source))
    next(running)
    ours = workers_of(psutil.Process())
    assert len(ours) == 2
    nursery = ours[0].parent()
    assert nursery is not None
    family = [nursery, *nursery.children(recursive=True)]
    running.close()
    _, alive = psutil.wait_procs(family, timeout=10)
    assert not alive
    assert not workers_of(psutil.Process())


ORPHAN = """
import sys
from dflash_core.recipe import Recipe
from dflash_core.shards.pipeline import tokenize_files
from dflash_core.storage.partitions import list_sources
from dflash_core.workspace import connect
workspace = connect(Recipe.model_validate_json(sys.argv[1]))
for outcome in tokenize_files(workspace, list_sources(workspace.source)):
    print(outcome.source.partition, flush=True)
"""


def test_workers_end_with_a_caller_that_is_killed_and_a_second_run_finishes(workspace_of: Open) -> None:
    workspace = workspace_of(**SLOW)
    for i in range(4):
        workspace.source.put(f"slow{i}.jsonl", slow_rows(3))
    command = [sys.executable, "-c", ORPHAN, workspace.recipe.model_dump_json()]
    caller = psutil.Popen(command, stdout=-1, cwd=Path(__file__).parents[2])
    caller.stdout.readline()
    family = caller.children(recursive=True)
    assert len(workers_of(caller)) == 2
    caller.kill()
    assert not psutil.wait_procs(family, timeout=60)[1]
    done = tokenized(workspace)
    assert len(done) == FILES + 4
    assert not failed(done)
    assert len(done_again(done)) < FILES + 4
