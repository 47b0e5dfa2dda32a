"""Files are processed one by one; one that fails takes no other along; what is done is not done again."""

import json
import signal
import sys
from pathlib import Path

import psutil
import pytest

from dflash_core.errors import RecipeError, StorageError
from dflash_core.records import ShardManifest
from dflash_core.shards.arrow import read_shard
from dflash_core.shards.overlap import FileFailed
from dflash_core.shards.pipeline import tokenize_files, verify_files
from dflash_core.shards.workers import FileDone
from dflash_core.storage.layout import ShardKeys
from dflash_core.storage.partitions import list_sources
from dflash_core.tokenization.tokenizer import fingerprint
from dflash_core.training_set.freeze import freeze_training_set
from dflash_core.workspace import Workspace, connect
from tests.shards.conftest import Open
from tests.shards.damage import DAMAGES, OBJECTS, Damage
from tests.shards.files import ROWS, by_partition, done_again, failed, objects, rows, tokenized

FILES = 6


@pytest.fixture(autouse=True)
def files(workspace: Workspace) -> None:
    for i in range(FILES):
        workspace.source.put(f"f{i}.jsonl", rows(f"f{i}"))


@pytest.mark.parametrize("workers", [1, 2])
def test_every_file_is_done_and_every_object_is_named_by_its_manifest(workspace_of: Open, workers: int) -> None:
    workspace = workspace_of(workers=workers)
    derived, done = workspace.derived, tokenized(workspace)
    assert sorted(done) == [f"f{i}" for i in range(FILES)]
    for partition, outcome in done.items():
        assert isinstance(outcome, FileDone)
        keys = ShardKeys(fingerprint(workspace.recipe), partition)
        manifest = derived.get_record(keys.manifest, ShardManifest)
        assert manifest == outcome.manifest
        named = (manifest.shard.key, manifest.rejects.key, manifest.statistics.key)
        assert named == (keys.shard, keys.rejects, keys.statistics)
        etags = {listed.key: listed.etag for listed in derived.list()}
        for stored in (manifest.shard, manifest.rejects, manifest.statistics):
            assert stored.etag == etags[stored.key]
        assert read_shard(derived.read(manifest.shard)).num_rows == manifest.rows_kept == ROWS
        assert derived.read(manifest.rejects) == b""
        assert json.loads(derived.read(manifest.statistics))["rows_kept"] == ROWS


def test_any_number_of_processes_writes_the_same_bytes(workspace_of: Open) -> None:
    written = []
    for workers in (1, 2):
        workspace = workspace_of(workers=workers)
        tokenized(workspace)
        written.append(objects(workspace.derived))
        for key in written[-1]:
            workspace.derived.delete(key)
    assert written[0] == written[1]


def test_what_is_done_is_skipped_and_only_what_changed_is_done_again(workspace_of: Open) -> None:
    workspace = workspace_of(workers=2)
    first = tokenized(workspace)
    workspace.source.put("f3.jsonl", rows("changed"))
    second = tokenized(workspace)
    assert done_again(second) == {"f3"}
    assert all(second[p].manifest == first[p].manifest for p in first if p != "f3")
    assert all(second[p].statistics == first[p].statistics for p in first if p != "f3")
    assert done_again(tokenized(workspace_of(max_length=99))) == set(first)


def test_a_file_that_lost_its_manifest_is_done_again(workspace: Workspace) -> None:
    tokenized(workspace)
    before = objects(workspace.derived)
    workspace.derived.delete(ShardKeys(fingerprint(workspace.recipe), "f2").manifest)
    assert done_again(tokenized(workspace)) == {"f2"}
    assert objects(workspace.derived) == before


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
@pytest.mark.parametrize("what", OBJECTS)
def test_a_file_of_which_any_object_is_damaged_is_done_again(workspace: Workspace, what: str, damage: Damage) -> None:
    workspace.source.put("f2.jsonl", rows("f2") + b"{}\n")
    tokenized(workspace)
    before = objects(workspace.derived)
    damage(workspace.derived, getattr(ShardKeys(fingerprint(workspace.recipe), "f2"), what))
    assert objects(workspace.derived) != before
    assert done_again(tokenized(workspace)) == {"f2"}
    assert objects(workspace.derived) == before


def test_bad_files_fail_alone_and_a_second_run_does_only_them(workspace_of: Open) -> None:
    workspace = workspace_of(workers=2)
    source = workspace.source
    source.put("bad.jsonl", b"{}\n")
    source.put("cut.jsonl.gz", b"\x1f\x8b\x08\x00abc")
    source.put("zero.jsonl", b"")
    sources = list_sources(source)
    source.put("f0.jsonl", rows("replaced while running"))
    source.delete("f1.jsonl")
    reasons = failed(by_partition(tokenize_files(workspace, sources)))
    assert sorted(reasons) == ["bad", "cut.jsonl.gz", "f0", "f1", "zero"]
    assert "none of 1 rows survives: no completion (1)" in reasons["bad"]
    assert "gzip" in reasons["cut.jsonl.gz"]
    assert "was replaced since it was listed" in reasons["f0"]
    assert "the object does not exist" in reasons["f1"]
    assert "is empty" in reasons["zero"]
    source.put("bad.jsonl", rows("good"))
    again = tokenized(workspace)
    assert done_again(again) == {"bad", "f0"}
    assert failed(again).keys() == {"cut.jsonl.gz", "zero"}


def test_a_wholly_bad_file_counts_in_the_gate(workspace_of: Open) -> None:
    """As a mostly bad one does: dropping every row of a file must not hide the file."""
    workspace = workspace_of(min_supervised_tokens=16)
    bad = [{"id": str(i), "prompt": "q", "completion": "OK."} for i in range(30)]
    workspace.source.put("bad.jsonl", "".join(json.dumps(row) + "\n" for row in bad).encode())
    assert "bad" in failed(tokenized(workspace))
    frozen = freeze_training_set(workspace)
    assert "bad" in frozen.missing
    assert "bad" not in {shard.partition for shard in frozen.shards}
    assert any("at most 16 supervised tokens" in reason and "bad" in reason for reason in frozen.verdict.reasons)
    assert "bad" in failed(tokenized(workspace))


def test_a_file_beyond_the_cap_is_refused_before_it_is_read(workspace: Workspace) -> None:
    source = list_sources(workspace.source)[0].model_copy(update={"size": 1 << 40})
    (outcome,) = tokenize_files(workspace, [source])
    assert isinstance(outcome, FileFailed)
    assert "split it" in outcome.reason


@pytest.mark.parametrize("workers", [1, 2])
def test_an_unusable_tokenizer_stops_the_run_with_its_sentence(
    workspace_of: Open, tmp_path: Path, workers: int
) -> None:
    template = tmp_path / "x.jinja"
    template.write_text("{{ messages[0].content }}")
    with pytest.raises(RecipeError, match="does not print the assistant's answer"):
        tokenized(workspace_of(workers=workers, chat_template=template))


def test_a_missing_bucket_stops_the_run_with_its_sentence(make_recipe, workspace: Workspace) -> None:
    missing = connect(make_recipe(bucket="missing-bucket"))
    with pytest.raises(StorageError, match="bucket 'missing-bucket' does not exist"):
        list(tokenize_files(missing, list_sources(workspace.source)))


def test_verify_counts_what_tokenize_would_and_writes_nothing(workspace: Workspace) -> None:
    workspace.source.put("f0.jsonl", rows("x") + b"\n{")
    workspace.source.put("cut.jsonl.gz", b"\x1f\x8b\x08\x00abc")
    done = {outcome.source.partition: outcome for outcome in verify_files(workspace, list_sources(workspace.source))}
    assert isinstance(done["cut.jsonl.gz"], FileFailed)
    assert not isinstance(done["f0"], FileFailed)
    assert done["f0"].rows_read == ROWS + 2
    assert [(r.line, r.reason) for r in done["f0"].rejects] == [(6, "blank line"), (7, "invalid JSON")]
    assert objects(workspace.derived) == {}


CRASH = """
import os, signal, sys
from dflash_core.recipe import Recipe
from dflash_core.shards.pipeline import tokenize_files
from dflash_core.storage.partitions import list_sources
from dflash_core.storage.s3 import Store
from dflash_core.workspace import connect
left, put = int(sys.argv[2]), Store.put
def crossing(self, key, body, content_type="application/octet-stream"):
    global left
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    left -= 1
    return put(self, key, body, content_type)
Store.put = crossing
workspace = connect(Recipe.model_validate_json(sys.argv[1]))
list(tokenize_files(workspace, list_sources(workspace.source)[:1]))
"""


@pytest.mark.parametrize("crossing", range(4))
def test_a_writer_killed_before_any_of_its_writes_leaves_nothing_that_counts(
    workspace: Workspace, crossing: int
) -> None:
    command = [sys.executable, "-c", CRASH, workspace.recipe.model_dump_json(), str(crossing)]
    assert psutil.Popen(command, cwd=Path(__file__).parents[2]).wait(60) == -signal.SIGKILL
    keys = ShardKeys(fingerprint(workspace.recipe), "f0")
    assert len(objects(workspace.derived)) == crossing
    assert keys.manifest not in objects(workspace.derived)
    (source, *_) = list_sources(workspace.source)
    (done,) = tokenize_files(workspace, [source])
    assert isinstance(done, FileDone)
    assert not done.skipped
    (again,) = tokenize_files(workspace, [source])
    assert isinstance(again, FileDone)
    assert again.skipped
    assert len(objects(workspace.derived)) == 4
