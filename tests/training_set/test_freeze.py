"""A training set holds exactly the shards that belong to the source as it is now, and its name is its content."""

import json
import re
from collections import Counter
from html import unescape
from pathlib import Path

import pytest

from dflash_core.errors import GateError, ObjectCorrupt, UserError
from dflash_core.recipe import GateSettings
from dflash_core.records import Reject, ShardManifest, TrainingSet, TrainingSetPointer
from dflash_core.shards.state import read_statistics
from dflash_core.statistics.merge import merge_statistics
from dflash_core.statistics.statistics import FileStatistics
from dflash_core.storage.layout import LATEST_TRAINING_SET, ShardKeys, TrainingSetKeys
from dflash_core.storage.s3 import Store
from dflash_core.tokenization.tokenizer import fingerprint
from dflash_core.training_set.freeze import (
    freeze_training_set,
    load_statistics,
    load_training_set,
    require_gate,
    training_set_hash,
)
from dflash_core.workspace import Workspace, connect
from tests.shards.conftest import Open
from tests.shards.damage import DAMAGES, OBJECTS
from tests.shards.files import failed, tokenized
from tests.statistics.conftest import MakeFile
from tests.statistics.rows import Row
from tests.training_set.conftest import GOOD, NAMES, Tokenize

OLD = Path(__file__).parent / "old"
"""Objects as they were written before TOKENIZATION_VERSION 4."""


def test_all_valid_shards_are_in_it_and_it_can_be_loaded(workspace: Workspace, tokenize: Tokenize) -> None:
    tokenize()
    frozen = freeze_training_set(workspace)
    assert [shard.partition for shard in frozen.shards] == NAMES
    assert (frozen.missing, frozen.coverage, frozen.verdict.reasons) == ((), 1.0, ())
    assert frozen.rows_read == frozen.rows_kept + frozen.rows_rejected == 12 * 121
    assert (frozen.reject_reasons, frozen.drop_reasons, frozen.rows_dropped) == ({"no JSON": 12}, {}, 0)
    assert frozen.tokens == sum(shard.tokens for shard in frozen.shards) == 12 * sum(s + 10 for s in GOOD)
    assert load_training_set(workspace.derived) == load_training_set(workspace.derived, frozen.hash) == frozen
    assert load_statistics(workspace.derived, frozen).rows_rendered == 12 * 120
    report = workspace.derived.get(TrainingSetKeys(frozen.hash).report).body.decode()
    assert frozen.hash in report
    assert "gate passed" in report


def test_the_same_input_gives_the_same_set_and_other_input_another(workspace: Workspace, tokenize: Tokenize) -> None:
    tokenize()
    first = freeze_training_set(workspace)
    assert freeze_training_set(workspace) == first
    stricter = workspace.recipe.model_copy(update={"gate": GateSettings(min_median_supervised_tokens=1000)})
    others = [
        freeze_training_set(workspace, NAMES[:11]),
        freeze_training_set(connect(stricter)),
    ]
    tokenize(["file_03"], GOOD[:50])
    others.append(freeze_training_set(workspace))
    assert len({first.hash, *(other.hash for other in others)}) == 4
    assert load_training_set(workspace.derived) == others[-1]
    assert load_training_set(workspace.derived, first.hash) == first, "an older set stays readable"


def test_the_hash_sees_every_field(workspace: Workspace, tokenize: Tokenize) -> None:
    tokenize()
    frozen = freeze_training_set(workspace)
    changes = {
        "recipe": "other",
        "fingerprint": "other",
        "shards": frozen.shards[1:],
        "missing": ("x",),
        "coverage": 0.5,
        "rows_read": 1,
        "rows_kept": 1,
        "rows_dropped": 1,
        "rows_rejected": 1,
        "drop_reasons": {"x": 1},
        "reject_reasons": {},
        "tokens": 1,
        "supervised_tokens": 1,
        "statistics": frozen.statistics.model_copy(update={"sha256": "0"}),
        "verdict": frozen.verdict.model_copy(update={"passed": False}),
    }
    assert set(changes) == set(TrainingSet.model_fields) - {"hash"}
    hashes = {training_set_hash(frozen.model_copy(update={name: value})) for name, value in changes.items()}
    assert len(hashes | {frozen.hash}) == len(changes) + 1


def test_missing_stale_damaged_and_foreign_shards_are_left_out(workspace: Workspace, tokenize: Tokenize) -> None:
    derived, name = workspace.derived, fingerprint(workspace.recipe)
    tokenize(NAMES[:8])
    workspace.source.put("file_01.jsonl", b"replaced since")
    derived.put(ShardKeys(name, "file_02").shard, b"other")
    statistics = derived.get(ShardKeys(name, "file_03").statistics).body
    derived.put(ShardKeys(name, "file_03").statistics, b"{}")
    derived.put(ShardKeys(name, "file_04").manifest, b"{ half")
    foreign = derived.get(ShardKeys(name, "file_05").manifest).body
    derived.put(ShardKeys(name, "file_06").manifest, foreign)
    frozen = freeze_training_set(workspace)
    assert [shard.partition for shard in frozen.shards] == ["file_00", "file_05", "file_07"]
    assert frozen.missing == tuple(sorted(set(NAMES) - {"file_00", "file_05", "file_07"}))
    assert frozen.coverage == 0.25
    (reason,) = frozen.verdict.reasons
    assert reason.startswith("3 of 12 files (25.0 %) can be trained on, at least 80.0 % wanted")
    keys = [ShardKeys(name, file) for file in NAMES]
    expected = (
        "file_01 (older than the source file)",
        f"file_02 (damaged ({keys[2].shard} has other bytes))",
        f"file_03 (damaged ({keys[3].statistics} has 2 bytes, not {len(statistics)}))",
        f"file_04 (damaged ({keys[4].manifest} cannot be read))",
        f"file_06 (damaged ({keys[6].manifest} is another file's))",
        "file_08 (not tokenized)",
    )
    assert ", ".join(expected) in reason


def test_a_set_of_nothing_is_refused(workspace: Workspace, tokenize: Tokenize) -> None:
    with pytest.raises(UserError, match="no training set yet; freeze one first"):
        load_training_set(workspace.derived)
    tokenize(fingerprint="other")
    with pytest.raises(UserError, match=r"of 12 files .* none has a valid shard .*12 are not tokenized.*tokenize them"):
        freeze_training_set(workspace)


def test_an_unknown_partition_is_named(workspace: Workspace, tokenize: Tokenize) -> None:
    with pytest.raises(UserError, match="no source file for file_99; there are 12, from file_00 to file_11"):
        freeze_training_set(workspace, ["file_01", "file_99"])


def test_an_edited_set_is_refused(workspace: Workspace, tokenize: Tokenize) -> None:
    tokenize()
    frozen = freeze_training_set(workspace)
    edited = frozen.model_copy(update={"rows_kept": frozen.rows_kept + 1})
    workspace.derived.put_record(TrainingSetKeys(frozen.hash).manifest, edited)
    with pytest.raises(ObjectCorrupt, match="is not what its hash says"):
        load_training_set(workspace.derived)
    with pytest.raises(UserError, match="no training set 0123; freeze one first"):
        load_training_set(workspace.derived, "0123")


def test_the_pointer_is_written_after_all_it_leads_to(
    workspace: Workspace, tokenize: Tokenize, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenize()
    written: list[str] = []
    put = Store.put

    def spy(self: Store, key: str, body: bytes, content_type: str = "application/octet-stream") -> object:
        written.append(key)
        return put(self, key, body, content_type)

    monkeypatch.setattr(Store, "put", spy)
    name = freeze_training_set(workspace).hash
    assert [key.removeprefix(f"training_set/{name}.") for key in written] == [
        "statistics.json",
        "html",
        "png",
        "json",
        "training_set/latest.json",
    ]
    pointer = workspace.derived.get_record(LATEST_TRAINING_SET, TrainingSetPointer)
    assert pointer == TrainingSetPointer(hash=name)


def test_training_starts_only_after_a_pass_or_by_name(workspace: Workspace, tokenize: Tokenize) -> None:
    tokenize()
    assert require_gate(freeze_training_set(workspace), accept_failed=False) == "passed"
    tokenize(["file_03"], [6] * 100 + GOOD[:20])
    failed = freeze_training_set(workspace)
    with pytest.raises(GateError, match=r"file_03: 100 of 120 rows \(83.3 %\) have at most 16 .* --accept-failed-gate"):
        require_gate(failed, accept_failed=False)
    assert require_gate(failed, accept_failed=True) == "accepted although failed"


def test_statistics_of_the_set_are_those_of_its_files(
    workspace: Workspace, tokenize: Tokenize, make_file: MakeFile
) -> None:
    tokenize()
    expected = merge_statistics(make_file(name, [Row(s) for s in GOOD], ["no JSON"]) for name in NAMES)
    assert load_statistics(workspace.derived, freeze_training_set(workspace)) == expected


@pytest.mark.parametrize("what", OBJECTS)
def test_files_of_which_an_object_is_damaged_are_missing_with_the_reason(
    workspace: Workspace, tokenize: Tokenize, what: str
) -> None:
    """Never does the set shrink in silence."""
    tokenize()
    name = fingerprint(workspace.recipe)
    harmed = {file: getattr(ShardKeys(name, file), what) for file, _ in zip(NAMES[3:], DAMAGES, strict=False)}
    for key, damage in zip(harmed.values(), DAMAGES.values(), strict=True):
        damage(workspace.derived, key)
    frozen = freeze_training_set(workspace)
    assert frozen.missing == tuple(harmed)
    assert [shard.partition for shard in frozen.shards] == [name for name in NAMES if name not in harmed]
    assert (frozen.coverage, frozen.rows_kept) == (8 / 12, 8 * len(GOOD))
    (reason,) = frozen.verdict.reasons
    for file, key in harmed.items():
        assert f"{file} (damaged ({key} " in reason


def test_a_file_with_rows_of_all_three_kinds_is_counted_alike_everywhere(workspace_of: Open) -> None:
    """Kept, dropped by a policy and rejected, from the shard's manifest to the page."""
    workspace = workspace_of(min_supervised_tokens=8)
    answer = "The quick brown fox jumps over the lazy dog"
    kept = [{"id": f"k{i}", "prompt": "q", "completion": f"{answer} {i}."} for i in range(6)]
    dropped = [{"id": f"d{i}", "prompt": "q", "completion": "OK."} for i in range(2)]
    lines = [json.dumps(row) for row in kept + dropped] + ["{ half", "", json.dumps({"prompt": "q", "completion": ""})]
    workspace.source.put("a.jsonl", "\n".join(lines).encode())
    workspace.source.put("b.jsonl", json.dumps(kept[0] | {"completion": answer * 2}).encode())
    assert not failed(tokenized(workspace))
    keys = ShardKeys(fingerprint(workspace.recipe), "a")
    manifest = workspace.derived.get_record(keys.manifest, ShardManifest)
    statistics = workspace.derived.get_record(keys.statistics, FileStatistics)
    frozen = freeze_training_set(workspace)
    merged = load_statistics(workspace.derived, frozen)

    drops, rejects = {"too few supervised tokens": 2}, {"blank line": 1, "empty completion": 1, "invalid JSON": 1}
    for one, read, whole in ((manifest, 11, 6), (statistics, 11, 6), (frozen, 12, 7), (merged, 12, 7)):
        assert (one.rows_read, one.rows_kept, one.rows_dropped, one.rows_rejected) == (read, whole, 2, 3), type(one)
    for one in (manifest, frozen):
        assert (one.drop_reasons, one.reject_reasons) == (drops, rejects)
    for counts in (statistics, merged):
        assert (counts.dropped, counts.rejected) == (drops, rejects)
        assert counts.rows_rendered == counts.rows_kept + 2
    listed = [Reject.model_validate_json(line) for line in workspace.derived.read(manifest.rejects).splitlines()]
    assert Counter(reject.reason for reject in listed) == Counter(drops | rejects)

    page = workspace.derived.get(TrainingSetKeys(frozen.hash).report).body.decode()
    shown = " ".join(unescape(re.sub("<[^>]+>", " ", page)).split())
    for part in ("12 rows read", "7 rows kept", "2 rows dropped", "3 rows rejected"):
        assert part in shown
    for part in (
        "dropped: too few supervised tokens 2 a, line 7",
        *(f"rejected: {reason} 1 a, line " for reason in rejects),
    ):
        assert part in shown
    reasons = "\n".join(frozen.verdict.reasons)
    assert "a: 3 of 11 rows (27.3 %) were rejected" in reasons
    assert "all files: 3 of 12 rows (25.0 %) were rejected" in reasons
    assert "a: 2 of 8 rows" not in reasons.replace("at most", "")


@pytest.fixture
def old(s3: Store) -> Store:
    """A store as the version before left it."""
    name = TrainingSet.model_validate_json((OLD / "training_set.json").read_bytes()).hash
    keys = TrainingSetKeys(name)
    s3.put(keys.manifest, (OLD / "training_set.json").read_bytes())
    s3.put(keys.statistics, (OLD / "training_set.statistics.json").read_bytes())
    s3.put_record(LATEST_TRAINING_SET, TrainingSetPointer(hash=name))
    manifest = (OLD / "shard_manifest.json").read_bytes()
    s3.put("manifest", manifest)
    s3.put(json.loads(manifest)["statistics"]["key"], (OLD / "file_statistics.json").read_bytes())
    return s3


def test_a_training_set_of_the_version_before_is_read_and_is_what_its_hash_says(old: Store) -> None:
    written = json.loads((OLD / "training_set.json").read_bytes())
    assert not {"rows_dropped", "drop_reasons"} & written.keys()
    frozen = load_training_set(old)
    assert frozen == load_training_set(old, written["hash"])
    assert (frozen.rows_dropped, frozen.drop_reasons, frozen.shards[0].shard.etag) == (None, None, None)
    assert (frozen.rows_rejected, frozen.reject_reasons) == (2, {"invalid JSON": 1, "too few supervised tokens": 1})
    merged = load_statistics(old, frozen)
    assert (merged.rows_dropped, merged.rows_rejected, merged.rows_read) == (1, 1, frozen.rows_read)
    old.put_record(TrainingSetKeys(frozen.hash).manifest, frozen.model_copy(update={"rows_kept": 1}))
    with pytest.raises(ObjectCorrupt, match="is not what its hash says"):
        load_training_set(old)


def test_a_shards_manifest_and_statistics_of_the_version_before_are_read(old: Store) -> None:
    manifest = old.get_record("manifest", ShardManifest)
    assert (manifest.code_version, manifest.rows_dropped, manifest.drop_reasons) == ("3", None, None)
    assert (manifest.shard.etag, manifest.rows_rejected, manifest.rows_read) == (None, 2, 5)
    statistics = read_statistics(old, manifest)
    assert (statistics.rows_read, statistics.rows_kept) == (manifest.rows_read, manifest.rows_kept)
    assert (statistics.rows_dropped, statistics.rows_rejected) == (1, 1)
