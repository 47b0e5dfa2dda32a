"""A bad way to the store fails the files it hits, each with a sentence; a rerun does only them, to the clean bytes."""

import json
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dflash_core.records import ShardManifest
from dflash_core.shards.arrow import read_shard
from dflash_core.shards.pipeline import tokenize_files
from dflash_core.shards.workers import FileDone
from dflash_core.storage import s3 as s3_module
from dflash_core.storage.layout import ShardKeys
from dflash_core.storage.partitions import list_sources
from dflash_core.storage.s3 import Access
from dflash_core.tokenization.tokenizer import fingerprint
from dflash_core.workspace import Workspace, connect
from tests.shards.conftest import Open
from tests.shards.files import done_again, failed, objects, rows, tokenized
from tests.storage.proxy import Proxy, Request, Status, proxy_of

FILES, ROWS = 8, 4


@pytest.fixture
def proxy(access: Access, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    monkeypatch.setattr(s3_module, "FIRST_PAUSE_S", 0.01)
    with proxy_of(access) as running:
        yield running


@pytest.fixture(autouse=True)
def files(workspace: Workspace) -> None:
    for i in range(FILES):
        workspace.source.put(f"f{i}.jsonl", rows(f"f{i}", ROWS))


@pytest.fixture
def far(workspace_of: Open, proxy: Proxy) -> Callable[..., Workspace]:
    """`far(workers=1)`: the workspace, its store behind the proxy."""

    def make(workers: int = 1, **storage: object) -> Workspace:
        update = {"endpoint_url": proxy.url, "attempts": 2, "read_timeout_s": 20.0, **storage}
        return with_storage(workspace_of(workers=workers), **update)

    return make


def with_storage(workspace: Workspace, **update: object) -> Workspace:
    recipe = workspace.recipe
    return connect(recipe.model_copy(update={"storage": recipe.storage.model_copy(update=update)}))


def clean_objects(workspace: Workspace) -> dict[str, bytes]:
    """What an undisturbed run writes."""
    clean = with_storage(workspace, prefix="clean/")
    assert not failed(tokenized(clean))
    return objects(clean.derived)


def test_files_that_cannot_be_read_fail_alone_and_a_second_run_does_only_them(
    workspace: Workspace, proxy: Proxy, far
) -> None:
    def script(request: Request):
        if request.path.endswith("completions/f1.jsonl"):
            return Status(403, "AccessDenied")
        if request.path.endswith("completions/f3.jsonl"):
            return "stall"
        if request.path.endswith("completions/f5.jsonl") and not request.number:
            workspace.source.put("f5.jsonl", rows("other", ROWS))
            return "truncate"
        return None

    proxy.script = script
    first = tokenized(far(2, read_timeout_s=2.0))
    reasons = failed(first)
    assert sorted(reasons) == ["f1", "f3", "f5"]
    assert "access denied" in reasons["f1"]
    assert "in each of 2 tries" in reasons["f3"]
    assert "was replaced since it was listed" in reasons["f5"]
    proxy.script = lambda request: None
    again = tokenized(far(2))
    assert done_again(again) == {"f1", "f3", "f5"}
    assert objects(workspace.derived) == clean_objects(workspace)


def test_credentials_that_end_in_the_middle_lose_nothing_that_was_done(workspace: Workspace, proxy: Proxy, far) -> None:
    manifests = Counter[str]()

    def script(request: Request):
        if request.method == "PUT" and "tokenized_shards" in request.path and request.path.endswith(".json"):
            manifests[request.path] += 1
        return Status(403, "ExpiredToken") if len(manifests) > FILES // 2 else None

    proxy.script = script
    first = tokenized(far())
    assert 0 < len(done_again(first)) < FILES
    assert all("refuses the credentials (ExpiredToken)" in reason for reason in failed(first).values())
    proxy.script = lambda request: None
    again = tokenized(far())
    assert done_again(again) == set(failed(first))
    assert objects(workspace.derived) == clean_objects(workspace)


def test_lost_answers_and_bursts_of_errors_leave_the_bytes_of_a_clean_run(
    workspace: Workspace, proxy: Proxy, far
) -> None:
    def script(request: Request):
        if request.number:
            return None
        return ("lose answer", Status(503, "SlowDown"), "drop", None)[len(request.path) % 4]

    proxy.script = script
    assert not failed(tokenized(far(2)))
    assert sum(proxy.seen.values()) > 4 * FILES
    assert objects(workspace.derived) == clean_objects(workspace)


def test_no_more_objects_are_in_flight_than_the_recipe_says(proxy: Proxy, far) -> None:
    """However many worker processes there are."""
    lock, now, most = threading.Lock(), Counter[str](), Counter[str]()

    def script(request: Request) -> None:
        if request.method == "GET" and "completions" not in request.path:
            return
        with lock:
            now[request.method] += 1
            most[request.method] = max(most[request.method], now[request.method])
        time.sleep(0.05)
        with lock:
            now[request.method] -= 1

    proxy.script = script
    assert not failed(tokenized(far(4, downloads=2, uploads=2)))
    assert max(most.values()) <= 2


RUN = """
import sys
from dflash_core.recipe import Recipe
from dflash_core.shards.overlap import FileFailed
from dflash_core.shards.pipeline import tokenize_files
from dflash_core.storage.partitions import list_sources
from dflash_core.workspace import connect
workspace = connect(Recipe.model_validate_json(sys.argv[1]))
sys.exit(any(isinstance(o, FileFailed) for o in tokenize_files(workspace, list_sources(workspace.source))))
"""


def test_many_writers_of_the_same_files_end_in_one_result(workspace_of: Open) -> None:
    workspace = workspace_of()
    command = [sys.executable, "-c", RUN, workspace.recipe.model_dump_json()]
    others = [subprocess.Popen(command, cwd=Path(__file__).parents[2]) for _ in range(2)]
    with ThreadPoolExecutor(4) as pool:
        ours = list(pool.map(lambda _: tokenized(workspace), range(4)))
    assert [other.wait(120) for other in others] == [0, 0]
    assert not any(failed(outcomes) for outcomes in ours)
    assert objects(workspace.derived) == clean_objects(workspace)
    for i in range(FILES):
        manifest = workspace.derived.get_record(
            ShardKeys(fingerprint(workspace.recipe), f"f{i}").manifest, ShardManifest
        )
        for stored in (manifest.shard, manifest.statistics, manifest.rejects):
            workspace.derived.read(stored)


def test_every_id_comes_once_however_often_the_run_was_broken(workspace_of: Open) -> None:
    workspace = workspace_of(workers=2)
    for stop_after in (1, 2, 3):
        running = tokenize_files(workspace, list_sources(workspace.source))
        for _ in range(stop_after):
            next(running)
        running.close()
    outcomes = tokenized(workspace)
    shards = [outcome.manifest.shard for outcome in outcomes.values() if isinstance(outcome, FileDone)]
    ids = [i for shard in shards for i in read_shard(workspace.derived.read(shard)).column("row_id").to_pylist()]
    assert sorted(ids) == sorted(f"f{file}-{row}" for file in range(FILES) for row in range(ROWS))


def test_what_others_keep_below_the_prefix_is_never_touched(workspace_of: Open) -> None:
    workspace = workspace_of()
    foreign = {
        "notes.txt": b"mine",
        f"tokenized_shards/{fingerprint(workspace.recipe)}/f0.parquet": b"mine",
        f"tokenized_shards/{fingerprint(workspace.recipe)}/elsewhere.json": b"{}",
        "tokenized_shards/another/f0.arrow": b"mine",
    }
    for key, content in foreign.items():
        workspace.derived.put(key, content)
    assert not failed(tokenized(workspace))
    assert not done_again(tokenized(workspace))
    assert {key: workspace.derived.get(key).body for key in foreign} == foreign


def test_rows_of_many_thousand_tokens_pass_through_several_processes(workspace_of: Open) -> None:
    """With threads of a Rust library in forked processes such a row has hung."""
    text = "".join(f"{i} apples, and the quick brown fox. " for i in range(12_000))
    workspace = workspace_of(workers=2, max_length=1 << 20, backend="fastokens")
    for i in range(2):
        row = {"id": f"long-{i}", "prompt": "q", "completion": text}
        workspace.source.put(f"f{i}.jsonl", json.dumps(row).encode())
    outcomes = tokenized(workspace)
    assert not failed(outcomes)
    lengths = [max(outcomes[f"f{i}"].statistics.lengths) for i in range(2)]  # type: ignore[union-attr]
    assert min(lengths) > 100_000
