"""THE rule: a shard is valid exactly while each object that its manifest names is there as it was written."""

from collections.abc import Iterator

import pytest

from dflash_core.errors import ObjectCorrupt, ObjectMissing
from dflash_core.records import ShardManifest, SourceFile
from dflash_core.shards import state as module
from dflash_core.shards.state import ShardProblem, ShardState, invalid_shards, read_statistics, shard_states
from dflash_core.storage.layout import ShardKeys
from dflash_core.storage.partitions import list_sources
from dflash_core.storage.s3 import Store
from dflash_core.tokenization.tokenizer import fingerprint
from dflash_core.workspace import Workspace, connect
from tests.shards.damage import DAMAGES, OBJECTS, Damage
from tests.shards.files import objects, rows, tokenized
from tests.tokenization.conftest import MakeRecipe

FILES = ("a", "b", "b.c", "hollow")


@pytest.fixture(scope="module")
def whole(make_recipe: MakeRecipe, module_bucket: str) -> Workspace:
    """Three files with rows and rejects, one without a row."""
    workspace = connect(make_recipe(bucket=module_bucket))
    for name in FILES:
        workspace.source.put(f"{name}.jsonl", (rows(name) if name != "hollow" else b"") + b"{ half\n")
    tokenized(workspace)
    return workspace


@pytest.fixture(params=["file by file", "by folders"])
def workspace(whole: Workspace, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Workspace]:
    """The same, asked in both ways of listing; what a test does to its objects is undone."""
    if request.param == "by folders":
        monkeypatch.setattr(module, "MAX_LISTINGS", 0)
    source, derived = objects(whole.source), objects(whole.derived)
    yield whole
    for store, before in ((whole.source, source), (whole.derived, derived)):
        now = objects(store)
        for key in now.keys() - before.keys():
            store.delete(key)
        for key, body in before.items():
            if now.get(key) != body or store.find_metadata(key) == {}:
                store.put(key, body)


def states(workspace: Workspace) -> dict[str, ShardState]:
    sources, name = list_sources(workspace.source), fingerprint(workspace.recipe)
    return {state.source.partition: state for state in shard_states(workspace.derived, name, sources, 4)}


def keys_of(workspace: Workspace, partition: str) -> ShardKeys:
    return ShardKeys(fingerprint(workspace.recipe), partition)


def problems(workspace: Workspace) -> dict[str, ShardProblem]:
    """Of the files with one, but for the hollow file's own."""
    found = {partition: state.problem for partition, state in states(workspace).items()}
    assert found.pop("hollow") == ShardProblem.WITHOUT_ROW
    return {partition: problem for partition, problem in found.items() if problem is not None}


def test_whole_shards_are_valid_and_one_without_a_row_says_so(workspace: Workspace) -> None:
    assert problems(workspace) == {}
    for partition, state in states(workspace).items():
        assert state.manifest == workspace.derived.get_record(keys_of(workspace, partition).manifest, ShardManifest)
        assert state.reason == ("without a row" if partition == "hollow" else "")


@pytest.mark.parametrize("damage", DAMAGES.items(), ids=DAMAGES)
@pytest.mark.parametrize("what", OBJECTS)
def test_a_damaged_object_makes_the_shard_damaged_and_is_named(
    workspace: Workspace, what: str, damage: tuple[str, Damage]
) -> None:
    name, act = damage
    key = getattr(keys_of(workspace, "b"), what)
    size = len(workspace.derived.get(key).body)
    act(workspace.derived, key)
    assert problems(workspace) == {"b": ShardProblem.DAMAGED}
    how = {"deleted": "is missing", "shortened": f"has {size - 1} bytes, not {size}"}.get(name, "has other bytes")
    assert states(workspace)["b"].reason == f"damaged ({key} {how})"


def test_everyone_who_asks_gets_the_same_files(workspace: Workspace) -> None:
    workspace.derived.delete(keys_of(workspace, "b").shard)
    workspace.derived.delete(keys_of(workspace, "a").manifest)
    name, sources = fingerprint(workspace.recipe), list_sources(workspace.source)
    invalid = invalid_shards(workspace.derived, name, sources, 4)
    assert {partition: state.problem for partition, state in invalid.items()} == {
        "a": ShardProblem.NOT_TOKENIZED,
        "b": ShardProblem.DAMAGED,
        "hollow": ShardProblem.WITHOUT_ROW,
    }
    assert list(invalid) == sorted(invalid)


def test_a_shard_of_an_older_source_file_is_older(workspace: Workspace) -> None:
    workspace.source.put("b.jsonl", rows("new"))
    assert problems(workspace) == {"b": ShardProblem.OLDER}
    assert states(workspace)["b"].manifest is not None


def test_what_was_never_tokenized_or_under_another_fingerprint_is_not_tokenized(workspace: Workspace) -> None:
    workspace.source.put("new.jsonl", rows("new"))
    assert problems(workspace) == {"new": ShardProblem.NOT_TOKENIZED}
    sources = list_sources(workspace.source)
    found = [state.problem for state in shard_states(workspace.derived, "f" * 16, sources, 4)]
    assert found == [ShardProblem.NOT_TOKENIZED] * len(sources)
    assert list(shard_states(workspace.derived, "f" * 16, [], 4)) == []


def test_a_manifest_that_cannot_be_read_or_is_another_files_is_damage(workspace: Workspace) -> None:
    derived = workspace.derived
    derived.put(keys_of(workspace, "a").manifest, b"{ half")
    derived.put(keys_of(workspace, "b").manifest, derived.get(keys_of(workspace, "b.c").manifest).body)
    assert problems(workspace) == {"a": ShardProblem.DAMAGED, "b": ShardProblem.DAMAGED}
    found = states(workspace)
    assert found["a"].reason == f"damaged ({keys_of(workspace, 'a').manifest} cannot be read)"
    assert found["b"].reason == f"damaged ({keys_of(workspace, 'b').manifest} is another file's)"


def without_etags(derived: Store, key: str) -> None:
    """As a manifest from before they were kept."""
    manifest = derived.get_record(key, ShardManifest)
    bare = {what: getattr(manifest, what).model_copy(update={"etag": None}) for what in OBJECTS}
    derived.put_record(key, manifest.model_copy(update=bare))


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_where_the_etag_cannot_tell_the_object_itself_is_asked(workspace: Workspace, damage: Damage) -> None:
    for partition in FILES:
        without_etags(workspace.derived, keys_of(workspace, partition).manifest)
    assert problems(workspace) == {}
    damage(workspace.derived, keys_of(workspace, "a").shard)
    assert problems(workspace) == {"a": ShardProblem.DAMAGED}


def test_statistics_are_read_as_they_were_written_or_refused(workspace: Workspace) -> None:
    keys = keys_of(workspace, "a")
    manifest = workspace.derived.get_record(keys.manifest, ShardManifest)
    found = read_statistics(workspace.derived, manifest)
    assert (found.partition, found.rows_kept) == ("a", manifest.rows_kept)
    for act in (DAMAGES["other bytes"], DAMAGES["shortened"]):
        act(workspace.derived, keys.statistics)
        with pytest.raises(ObjectCorrupt, match="damaged or overwritten"):
            read_statistics(workspace.derived, manifest)
    foreign = workspace.derived.put(keys.statistics, b"{}")
    with pytest.raises(ObjectCorrupt, match="cannot be read"):
        read_statistics(workspace.derived, manifest.model_copy(update={"statistics": foreign}))
    workspace.derived.delete(keys.statistics)
    with pytest.raises(ObjectMissing):
        read_statistics(workspace.derived, manifest)


def test_a_file_that_vanished_meanwhile_is_none_that_anybody_asked_for(workspace: Workspace) -> None:
    (source, *_) = list_sources(workspace.source)
    asked: list[SourceFile] = [source]
    found = list(shard_states(workspace.derived, fingerprint(workspace.recipe), asked, 4))
    assert [state.source for state in found] == asked
