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

from dflash_core.recipe import Recipe
from dflash_core.records import ShardManifest
from dflash_core.storage import store as store_module
from dflash_core.storage.embedded import Endpoint
from dflash_core.storage.store import Store, Stores, list_sources, open_stores
from dflash_core.tokenization.fingerprint import fingerprint
from dflash_core.tokenization.objects import Names
from dflash_core.tokenization.pipeline import FileDone, FileFailed, process_files
from dflash_core.tokenization.shards import read_shard
from tests.storage.proxy import Proxy, Request, Status, proxy_of

FILES, ROWS = 8, 4
Outcomes = dict[str, FileDone | FileFailed]


def body(name: str, rows: int = ROWS) -> bytes:
    made = [{"id": f"{name}-{i}", "prompt": f"q {i}", "completion": f"the answer {name} {i}"} for i in range(rows)]
    return "".join(json.dumps(row) + "\n" for row in made).encode()


@pytest.fixture
def proxy(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    monkeypatch.setattr(store_module, "FIRST_PAUSE_S", 0.01)
    with proxy_of(endpoint.url) as running:
        yield running


@pytest.fixture
def stores(make_recipe, bucket: str) -> Stores:
    stores = open_stores(make_recipe(bucket=bucket))
    for i in range(FILES):
        stores.source.put(f"f{i}.jsonl", body(f"f{i}"))
    return stores


@pytest.fixture
def far(make_recipe, bucket: str, proxy: Proxy) -> Callable[..., Recipe]:
    """`far(workers=1)`: the recipe, its store behind the proxy."""

    def make(workers: int = 1, read_timeout_s: float = 20.0) -> Recipe:
        recipe: Recipe = make_recipe(bucket=bucket, workers=workers)
        update = {"endpoint_url": proxy.url, "attempts": 2, "read_timeout_s": read_timeout_s}
        return recipe.model_copy(update={"storage": recipe.storage.model_copy(update=update)})

    return make


def run(recipe: Recipe, stores: Stores) -> Outcomes:
    return {outcome.source.partition: outcome for outcome in process_files(recipe, list_sources(stores.source))}


def failed(outcomes: Outcomes) -> dict[str, str]:
    return {p: outcome.reason for p, outcome in outcomes.items() if isinstance(outcome, FileFailed)}


def done_anew(outcomes: Outcomes) -> set[str]:
    return {p for p, outcome in outcomes.items() if isinstance(outcome, FileDone) and not outcome.skipped}


def objects(derived: Store) -> dict[str, bytes]:
    return {key: derived.get(key).body for key, _, _ in derived.list()}


def clean_objects(make_recipe, bucket: str, stores: Stores) -> dict[str, bytes]:
    """What an undisturbed run writes."""
    recipe = make_recipe(bucket=bucket)
    recipe = recipe.model_copy(update={"storage": recipe.storage.model_copy(update={"prefix": "clean/"})})
    assert not failed(run(recipe, stores))
    return objects(open_stores(recipe).derived)


def test_files_that_cannot_be_read_fail_alone_and_a_rerun_does_only_them(
    make_recipe, bucket: str, stores: Stores, proxy: Proxy, far
) -> None:
    def script(request: Request):
        if request.path.endswith("completions/f1.jsonl"):
            return Status(403, "AccessDenied")
        if request.path.endswith("completions/f3.jsonl"):
            return "stall"
        if request.path.endswith("completions/f5.jsonl") and not request.number:
            stores.source.put("f5.jsonl", body("other"))
            return "truncate"
        return None

    proxy.script = script
    first = run(far(2, read_timeout_s=2.0), stores)
    reasons = failed(first)
    assert sorted(reasons) == ["f1", "f3", "f5"]
    assert "access denied" in reasons["f1"]
    assert "in each of 2 tries" in reasons["f3"]
    assert "was replaced since it was listed" in reasons["f5"]
    proxy.script = lambda request: None
    again = run(far(2), stores)
    assert done_anew(again) == {"f1", "f3", "f5"}
    assert objects(stores.derived) == clean_objects(make_recipe, bucket, stores)


def test_credentials_that_end_in_the_middle_lose_nothing_that_was_done(
    make_recipe, bucket: str, stores: Stores, proxy: Proxy, far
) -> None:
    manifests = Counter[str]()

    def script(request: Request):
        if request.method == "PUT" and "tokenized_shards" in request.path and request.path.endswith(".json"):
            manifests[request.path] += 1
        return Status(403, "ExpiredToken") if len(manifests) > FILES // 2 else None

    proxy.script = script
    first = run(far(), stores)
    assert 0 < len(done_anew(first)) < FILES
    assert all("refuses the credentials (ExpiredToken)" in reason for reason in failed(first).values())
    proxy.script = lambda request: None
    again = run(far(), stores)
    assert done_anew(again) == set(failed(first))
    assert objects(stores.derived) == clean_objects(make_recipe, bucket, stores)


def test_lost_answers_and_bursts_of_errors_leave_the_bytes_of_a_clean_run(
    make_recipe, bucket: str, stores: Stores, proxy: Proxy, far
) -> None:
    def script(request: Request):
        if request.number:
            return None
        return ("lose answer", Status(503, "SlowDown"), "drop", None)[len(request.path) % 4]

    proxy.script = script
    assert not failed(run(far(2), stores))
    assert sum(proxy.seen.values()) > 4 * FILES
    assert objects(stores.derived) == clean_objects(make_recipe, bucket, stores)


def test_no_more_objects_are_in_flight_than_the_recipe_says(stores: Stores, proxy: Proxy, far) -> None:
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
    recipe = far(4)
    storage = recipe.storage.model_copy(update={"downloads": 2, "uploads": 2})
    assert not failed(run(recipe.model_copy(update={"storage": storage}), stores))
    assert max(most.values()) <= 2


RUN = """
import sys
from dflash_core.recipe import Recipe
from dflash_core.storage.store import list_sources, open_stores
from dflash_core.tokenization.pipeline import FileFailed, process_files
recipe = Recipe.model_validate_json(sys.argv[1])
sys.exit(any(isinstance(o, FileFailed) for o in process_files(recipe, list_sources(open_stores(recipe).source))))
"""


def test_many_writers_of_the_same_files_end_in_one_result(make_recipe, bucket: str, stores: Stores) -> None:
    recipe = make_recipe(bucket=bucket)
    command = [sys.executable, "-c", RUN, recipe.model_dump_json()]
    others = [subprocess.Popen(command, cwd=Path(__file__).parents[2]) for _ in range(2)]
    with ThreadPoolExecutor(4) as pool:
        ours = list(pool.map(lambda _: run(recipe, stores), range(4)))
    assert [other.wait(120) for other in others] == [0, 0]
    assert not any(failed(outcomes) for outcomes in ours)
    assert objects(stores.derived) == clean_objects(make_recipe, bucket, stores)
    for i in range(FILES):
        manifest = stores.derived.get_record(Names(fingerprint(recipe), f"f{i}").manifest, ShardManifest)
        for stored in (manifest.shard, manifest.statistics, manifest.rejects):
            stores.derived.read(stored)


def test_every_id_comes_once_however_often_the_run_was_broken(make_recipe, bucket: str, stores: Stores) -> None:
    recipe = make_recipe(bucket=bucket, workers=2)
    for stop_after in (1, 2, 3):
        running = process_files(recipe, list_sources(stores.source))
        for _ in range(stop_after):
            next(running)
        running.close()
    outcomes = run(recipe, stores)
    shards = [outcome.manifest.shard for outcome in outcomes.values() if isinstance(outcome, FileDone)]
    ids = [i for shard in shards for i in read_shard(stores.derived.read(shard)).column("row_id").to_pylist()]
    assert sorted(ids) == sorted(f"f{file}-{row}" for file in range(FILES) for row in range(ROWS))


def test_what_others_keep_below_the_prefix_is_never_touched(make_recipe, bucket: str, stores: Stores) -> None:
    recipe = make_recipe(bucket=bucket)
    foreign = {
        "notes.txt": b"mine",
        f"tokenized_shards/{fingerprint(recipe)}/f0.parquet": b"mine",
        f"tokenized_shards/{fingerprint(recipe)}/elsewhere.json": b"{}",
        "tokenized_shards/another/f0.arrow": b"mine",
    }
    for key, content in foreign.items():
        stores.derived.put(key, content)
    assert not failed(run(recipe, stores))
    assert not done_anew(run(recipe, stores))
    assert {key: stores.derived.get(key).body for key in foreign} == foreign


def test_rows_of_many_thousand_tokens_pass_through_several_processes(make_recipe, bucket: str, stores: Stores) -> None:
    """With threads of a Rust library in forked processes such a row has hung."""
    text = "".join(f"{i} apples, and the quick brown fox. " for i in range(12_000))
    for i in range(2):
        row = {"id": f"long-{i}", "prompt": "q", "completion": text}
        stores.source.put(f"f{i}.jsonl", json.dumps(row).encode())
    recipe = make_recipe(bucket=bucket, workers=2, max_length=1 << 20, backend="fastokens")
    outcomes = run(recipe, stores)
    assert not failed(outcomes)
    lengths = [max(outcomes[f"f{i}"].statistics.lengths) for i in range(2)]  # type: ignore[union-attr]
    assert min(lengths) > 100_000
