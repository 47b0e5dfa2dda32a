"""A training set holds exactly the shards that belong to the source as it is now, and its name is its content."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from dflash_core.errors import GateError, ObjectCorrupt, UserError
from dflash_core.quality.statistics import FileStatistics, merge_statistics
from dflash_core.quality.training_set import (
    freeze_training_set,
    load_statistics,
    load_training_set,
    manifest_key,
    report_key,
    require_gate,
    training_set_hash,
)
from dflash_core.recipe import Gate, Recipe, Source, Storage, Target
from dflash_core.records import ShardManifest, SourceFile, TrainingSet, TrainingSetPointer
from dflash_core.storage.store import Store, list_sources, open_stores

FINGERPRINT = "f00dfeed"
NAMES = [f"file_{k:02}" for k in range(12)]
GOOD = [40 + 3 * i for i in range(120)]

Make = Callable[..., FileStatistics]


@pytest.fixture
def recipe(bucket: str) -> Recipe:
    return Recipe(
        name="test",
        source=Source(bucket=bucket, prefix="completions/"),
        storage=Storage(bucket=bucket, prefix="derived/", downloads=8),
        target=Target(path=Path("unused")),
        gate=Gate(min_coverage=0.8),
    )


@pytest.fixture
def tokenize(recipe: Recipe, make_file: Make, row: Make) -> Callable[..., None]:
    """Stand-in for tokenization: a shard of any bytes, true statistics, and the manifest last."""
    stores = open_stores(recipe)

    def tokenize(
        names: Sequence[str] = NAMES, supervised: Sequence[int] = GOOD, fingerprint: str = FINGERPRINT
    ) -> None:
        for source in list_sources(stores.source):
            if source.partition in names:
                found = make_file(source.partition, [row(s) for s in supervised], ["no JSON"])
                stores.derived.put_record(
                    manifest_key(fingerprint, source.partition), _manifest(stores.derived, source, found, fingerprint)
                )

    for name in NAMES:
        stores.source.put(f"{name}.jsonl", name.encode())
    return tokenize


def _manifest(derived: Store, source: SourceFile, found: FileStatistics, fingerprint: str) -> ShardManifest:
    return ShardManifest(
        fingerprint=fingerprint,
        code_version="1",
        source=source,
        source_sha256="0" * 64,
        shard=derived.put(f"tokenized_shards/{fingerprint}/{source.partition}.arrow", b"shard"),
        statistics=derived.put(
            f"loss_mask_stats/{fingerprint}/{source.partition}.json", found.model_dump_json().encode()
        ),
        rejects=derived.put(f"tokenized_shards/{fingerprint}/{source.partition}.rejects.jsonl", b""),
        rows_read=found.rows_read,
        rows_kept=found.rows_kept,
        rows_rejected=found.rows_read - found.rows_kept,
        reject_reasons={**found.rejected, **found.dropped},
        tokens=found.tokens,
        supervised_tokens=found.supervised_tokens,
    )


def test_all_valid_shards_are_in_it_and_it_can_be_loaded(recipe: Recipe, tokenize: Callable[..., None]) -> None:
    tokenize()
    frozen = freeze_training_set(recipe, FINGERPRINT)
    assert [shard.partition for shard in frozen.shards] == NAMES
    assert (frozen.missing, frozen.coverage, frozen.verdict.reasons) == ((), 1.0, ())
    assert frozen.rows_read == frozen.rows_kept + frozen.rows_rejected == 12 * 121
    assert frozen.reject_reasons == {"no JSON": 12}
    assert frozen.tokens == sum(shard.tokens for shard in frozen.shards) == 12 * sum(s + 10 for s in GOOD)
    assert load_training_set(recipe) == load_training_set(recipe, frozen.hash) == frozen
    assert load_statistics(recipe, frozen).rows_rendered == 12 * 120
    report = open_stores(recipe).derived.get(report_key(frozen)).body.decode()
    assert frozen.hash in report
    assert "gate passed" in report


def test_the_same_input_gives_the_same_set_and_other_input_another(
    recipe: Recipe, tokenize: Callable[..., None]
) -> None:
    tokenize()
    first = freeze_training_set(recipe, FINGERPRINT)
    assert freeze_training_set(recipe, FINGERPRINT) == first
    others = [
        freeze_training_set(recipe, FINGERPRINT, NAMES[:11]),
        freeze_training_set(recipe.model_copy(update={"gate": Gate(min_median_supervised_tokens=1000)}), FINGERPRINT),
    ]
    tokenize(["file_03"], GOOD[:50])
    others.append(freeze_training_set(recipe, FINGERPRINT))
    assert len({first.hash, *(other.hash for other in others)}) == 4
    assert load_training_set(recipe) == others[-1]
    assert load_training_set(recipe, first.hash) == first, "an older set stays readable"


def test_the_hash_sees_every_field(recipe: Recipe, tokenize: Callable[..., None]) -> None:
    tokenize()
    frozen = freeze_training_set(recipe, FINGERPRINT)
    changes = {
        "recipe": "other",
        "fingerprint": "other",
        "shards": frozen.shards[1:],
        "missing": ("x",),
        "coverage": 0.5,
        "rows_read": 1,
        "rows_kept": 1,
        "rows_rejected": 1,
        "reject_reasons": {},
        "tokens": 1,
        "supervised_tokens": 1,
        "statistics": frozen.statistics.model_copy(update={"sha256": "0"}),
        "verdict": frozen.verdict.model_copy(update={"passed": False}),
    }
    assert set(changes) == set(TrainingSet.model_fields) - {"hash"}
    hashes = {training_set_hash(frozen.model_copy(update={name: value})) for name, value in changes.items()}
    assert len(hashes | {frozen.hash}) == len(changes) + 1


def test_missing_stale_damaged_and_foreign_shards_are_left_out(recipe: Recipe, tokenize: Callable[..., None]) -> None:
    stores = open_stores(recipe)
    tokenize(NAMES[:8])
    stores.source.put("file_01.jsonl", b"replaced since")
    stores.derived.put(f"tokenized_shards/{FINGERPRINT}/file_02.arrow", b"other")
    stores.derived.put(f"loss_mask_stats/{FINGERPRINT}/file_03.json", b"{}")
    stores.derived.put(manifest_key(FINGERPRINT, "file_04"), b"{ half")
    foreign = stores.derived.get(manifest_key(FINGERPRINT, "file_05")).body
    stores.derived.put(manifest_key(FINGERPRINT, "file_06"), foreign)
    frozen = freeze_training_set(recipe, FINGERPRINT)
    assert [shard.partition for shard in frozen.shards] == ["file_00", "file_05", "file_07"]
    assert frozen.missing == tuple(sorted(set(NAMES) - {"file_00", "file_05", "file_07"}))
    assert frozen.coverage == 0.25
    (reason,) = frozen.verdict.reasons
    assert reason.startswith("3 of 12 files (25.0 %) can be trained on, at least 80.0 % wanted")
    assert "file_01 (older than the source file), file_02 (damaged), file_03 (damaged), file_04 (damaged)" in reason
    assert "file_06 (of another fingerprint or file), file_08 (not tokenized)" in reason


def test_a_set_of_nothing_is_refused(recipe: Recipe, tokenize: Callable[..., None]) -> None:
    with pytest.raises(UserError, match="no training set yet; freeze one first"):
        load_training_set(recipe)
    tokenize(fingerprint="other")
    with pytest.raises(UserError, match=r"of 12 files .* none has a valid shard .*12 are not tokenized.*tokenize them"):
        freeze_training_set(recipe, FINGERPRINT)


def test_an_unknown_partition_is_named(recipe: Recipe, tokenize: Callable[..., None]) -> None:
    with pytest.raises(UserError, match="no source file for file_99; there are 12, from file_00 to file_11"):
        freeze_training_set(recipe, FINGERPRINT, ["file_01", "file_99"])


def test_an_edited_set_is_refused(recipe: Recipe, tokenize: Callable[..., None]) -> None:
    tokenize()
    frozen = freeze_training_set(recipe, FINGERPRINT)
    edited = frozen.model_copy(update={"rows_kept": frozen.rows_kept + 1})
    open_stores(recipe).derived.put_record(f"training_set/{frozen.hash}.json", edited)
    with pytest.raises(ObjectCorrupt, match="is not what its hash says"):
        load_training_set(recipe)
    with pytest.raises(UserError, match="no training set 0123; freeze one first"):
        load_training_set(recipe, "0123")


def test_the_pointer_is_written_after_all_it_leads_to(
    recipe: Recipe, tokenize: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenize()
    written: list[str] = []
    put = Store.put

    def spy(self: Store, key: str, body: bytes, content_type: str = "application/octet-stream") -> object:
        written.append(key)
        return put(self, key, body, content_type)

    monkeypatch.setattr(Store, "put", spy)
    name = freeze_training_set(recipe, FINGERPRINT).hash
    assert [key.removeprefix(f"training_set/{name}.") for key in written] == [
        "statistics.json",
        "html",
        "png",
        "json",
        "training_set/latest.json",
    ]
    pointer = open_stores(recipe).derived.get_record("training_set/latest.json", TrainingSetPointer)
    assert pointer == TrainingSetPointer(hash=name)


def test_training_starts_only_after_a_pass_or_by_name(recipe: Recipe, tokenize: Callable[..., None]) -> None:
    tokenize()
    assert require_gate(freeze_training_set(recipe, FINGERPRINT), accept_failed=False) == "passed"
    tokenize(["file_03"], [6] * 100 + GOOD[:20])
    failed = freeze_training_set(recipe, FINGERPRINT)
    with pytest.raises(GateError, match=r"file_03: 100 of 120 rows \(83.3 %\) have at most 16 .* --accept-failed-gate"):
        require_gate(failed, accept_failed=False)
    assert require_gate(failed, accept_failed=True) == "accepted although failed"


def test_statistics_of_the_set_are_those_of_its_files(
    recipe: Recipe, tokenize: Callable[..., None], make_file: Make, row: Make
) -> None:
    tokenize()
    expected = merge_statistics(make_file(name, [row(s) for s in GOOD], ["no JSON"]) for name in NAMES)
    assert load_statistics(recipe, freeze_training_set(recipe, FINGERPRINT)) == expected
