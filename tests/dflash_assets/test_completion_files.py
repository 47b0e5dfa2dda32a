"""One bad file fails alone; good partitions are kept, and only the bad ones need another run."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import dagster as dg
import pytest

from dflash_assets import completion_files as module
from dflash_assets.partitions import completion_files
from dflash_core.records import SourceFile
from dflash_core.shards.overlap import FileFailed
from dflash_core.shards.pipeline import tokenize_files
from dflash_core.shards.workers import FileDone
from dflash_core.storage.s3 import Store
from dflash_core.workspace import Workspace
from tests.dflash_assets.conftest import require_supervised_tokens

ASSETS = ("raw_completions", "tokenized_shards", "loss_mask_stats")
Materialize = Callable[..., dg.ExecuteInProcessResult]
Sync = Callable[[], tuple[SourceFile, ...]]
Rows = Callable[[int, str], bytes]


def partitions_by_status(instance: dg.DagsterInstance, asset: str) -> dict[str, set[str]]:
    statuses = instance.get_status_by_partition(
        dg.AssetKey(asset), instance.get_dynamic_partitions("completion_files"), completion_files
    )
    found: dict[str, set[str]] = {}
    for partition, status in (statuses or {}).items():
        found.setdefault("none" if status is None else status.name, set()).add(partition)
    return found


def last_metadata(instance: dg.DagsterInstance, asset: str, partition: str) -> dict[str, object]:
    (record,) = instance.fetch_materializations(
        dg.AssetRecordsFilter(asset_key=dg.AssetKey(asset), asset_partitions=[partition]), limit=1
    ).records
    assert record.asset_materialization is not None
    return {name: value.value for name, value in record.asset_materialization.metadata.items()}


def test_two_bad_files_of_ten_fail_alone(
    instance: dg.DagsterInstance, source: Store, materialize: Materialize, sync: Sync, rows: Rows
) -> None:
    for number in range(10):
        source.put(f"part-{number}.jsonl", rows(5, f"part-{number}"))
    source.put("part-3.jsonl.gz", b"\x1f\x8b broken")
    source.put("part-7.jsonl", b"not json at all\n")
    partitions = sorted(s.partition for s in sync())

    result = materialize(partitions)

    assert not result.success
    failure = result.failure_data_for_node("completion_files")
    assert failure is not None
    assert failure.user_failure_data is not None
    assert "2 of 11 files failed" in (failure.user_failure_data.description or "")
    bad = {"part-3.jsonl.gz", "part-7"}
    for asset in ASSETS:
        assert partitions_by_status(instance, asset) == {"MATERIALIZED": set(partitions) - bad, "FAILED": bad}

    source.put("part-3.jsonl.gz", rows(5, "part-3-again"))
    source.put("part-7.jsonl", rows(5, "part-7-again"))
    for partition in sorted(bad):
        assert materialize([partition]).success
    for asset in ASSETS:
        assert partitions_by_status(instance, asset) == {"MATERIALIZED": set(partitions)}


def test_a_bad_line_rejects_that_line(
    instance: dg.DagsterInstance, source: Store, materialize: Materialize, sync: Sync, rows: Rows
) -> None:
    source.put("a.jsonl", rows(4, "a") + b'{"messages": [{"role": "us\n' + rows(2, "b"))
    sync()
    assert materialize(["a"]).success
    metadata = last_metadata(instance, "tokenized_shards", "a")
    assert (metadata["rows read"], metadata["dagster/row_count"], metadata["rows rejected"]) == (7, 6, 1)
    assert sum(metadata["reject reasons"].values()) == 1  # type: ignore[attr-defined]
    statistics = last_metadata(instance, "loss_mask_stats", "a")
    assert statistics["rows rendered"] == 6
    assert statistics["median supervised tokens"] > 16  # type: ignore[operator]
    assert statistics["near-empty share"] == 0.0


def test_dropped_and_rejected_rows_are_told_apart(
    instance: dg.DagsterInstance,
    recipe_file: Path,
    source: Store,
    materialize: Materialize,
    sync: Sync,
    rows: Callable[..., bytes],
) -> None:
    """Dropped: rendered, and left out by a policy. Rejected: never rendered."""
    require_supervised_tokens(recipe_file, 9)
    short = rows(2, "s", reasoning="", answer="7")
    source.put("a.jsonl", rows(4, "a") + short + b'{"messages": [{"role": "us\n')
    sync()
    result = materialize(["a"])
    assert result.success
    expected = {"rows read": 7, "rows kept": 4, "rows dropped": 2, "rows rejected": 1}
    metadata = last_metadata(instance, "tokenized_shards", "a")
    assert {name: metadata[name] for name in expected if name != "rows kept"} | {"rows kept": 4} == expected
    assert metadata["dagster/row_count"] == 4
    assert metadata["drop reasons"] == {"too few supervised tokens": 2}
    assert metadata["reject reasons"] == {"invalid JSON": 1}
    (check,) = [one for one in result.get_asset_check_evaluations() if one.check_name == "rows_conserved"]
    assert {name: check.metadata[name].value for name in expected} == expected
    assert last_metadata(instance, "loss_mask_stats", "a")["rows rendered"] == 6


def test_a_manifest_whose_numbers_do_not_add_up_fails_the_check(
    source: Store, materialize: Materialize, sync: Sync, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = {"kept": 3, "dropped": 1, "rejected": 1, "read": 5}

    def tokenize(workspace: Workspace, sources: Sequence[SourceFile]) -> Iterator[FileDone | FileFailed]:
        for done in tokenize_files(workspace, sources):
            assert isinstance(done, FileDone)
            name = done.source.partition
            update = {f"rows_{name}": wrong[name]} if name in wrong else {}
            yield replace(done, manifest=done.manifest.model_copy(update=update))

    monkeypatch.setattr(module, "tokenize_files", tokenize)
    for name in (*wrong, "whole"):
        source.put(f"{name}.jsonl", rows(4, name))
    sync()
    done = materialize(sorted((*wrong, "whole")))
    checks = {check.check_name: check for check in done.get_asset_check_evaluations()}
    assert not checks["rows_conserved"].passed
    assert set(checks["rows_conserved"].metadata["files that lost rows"].value) == set(wrong)  # type: ignore[arg-type]


def test_what_is_valid_is_not_done_again_and_says_so(
    instance: dg.DagsterInstance, source: Store, materialize: Materialize, sync: Sync, rows: Rows
) -> None:
    source.put("a.jsonl", rows(4, "a"))
    sync()
    materialize(["a"])
    first = last_metadata(instance, "tokenized_shards", "a")
    materialize(["a"])
    again = last_metadata(instance, "tokenized_shards", "a")
    assert (first["skipped, still valid"], again["skipped, still valid"]) == (False, True)
    assert first["sha256"] == again["sha256"]

    source.put("a.jsonl", rows(5, "a"))
    materialize(["a"])
    changed = last_metadata(instance, "tokenized_shards", "a")
    assert changed["skipped, still valid"] is False
    assert changed["sha256"] != first["sha256"]


def test_data_versions_are_per_partition(
    instance: dg.DagsterInstance, source: Store, materialize: Materialize, sync: Sync, rows: Rows
) -> None:
    for name in ("a", "b"):
        source.put(f"{name}.jsonl", rows(4, name))
    sync()
    materialize(["a", "b"])
    for asset in ASSETS:
        versions = set()
        for partition in ("a", "b"):
            event = instance.fetch_materializations(
                dg.AssetRecordsFilter(asset_key=dg.AssetKey(asset), asset_partitions=[partition]), limit=1
            ).records[0]
            assert event.asset_materialization is not None
            assert event.asset_materialization.tags is not None
            versions.add(event.asset_materialization.tags["dagster/data_version"])
        assert len(versions) == 2


def test_what_is_green_is_not_stale_until_its_upstream_changes(
    instance: dg.DagsterInstance,
    source: Store,
    materialize: Materialize,
    sync: Sync,
    rows: Rows,
    stale: Callable[[str, str | None], list[str]],
) -> None:
    def all_stale() -> dict[str, list[str]]:
        return {f"{asset} {name}": found for asset in ASSETS for name in ("a", "b") if (found := stale(asset, name))}

    for name in ("a", "b"):
        source.put(f"{name}.jsonl", rows(4, name))
    sync()
    for _ in range(2):
        assert materialize(["a", "b"]).success
        assert all_stale() == {}

    source.put("a.jsonl", rows(5, "a"))
    assert materialize(["a"], ["raw_completions"]).success
    assert all_stale() == {"tokenized_shards a": ["has a new dependency data version"]}
    assert materialize(["a"], ["tokenized_shards"]).success
    assert all_stale() == {"loss_mask_stats a": ["has a new dependency data version"]}
    assert materialize(["a"]).success
    assert all_stale() == {}


def test_a_vanished_file_fails_its_partition(
    instance: dg.DagsterInstance, source: Store, materialize: Materialize, sync: Sync, rows: Rows
) -> None:
    for name in ("a", "b"):
        source.put(f"{name}.jsonl", rows(4, name))
    sync()
    source.client.delete_object(Bucket=source.bucket, Key=source.prefix + "b.jsonl")
    assert not materialize(["a", "b"]).success
    assert partitions_by_status(instance, "tokenized_shards") == {"MATERIALIZED": {"a"}, "FAILED": {"b"}}


@pytest.mark.parametrize(
    ("right", "wrong", "sentence"),
    [
        ('bucket = "', 'bucket = "no-such-', "does not exist"),
        ("completions/", "nothing/", "holds no file of completions"),
        ("demo/target", "demo/nothing", "demo/nothing"),
    ],
    ids=["bucket", "prefix", "tokenizer"],
)
def test_bad_input_fails_with_one_sentence(
    source: Store,
    materialize: Materialize,
    sync: Sync,
    rows: Rows,
    recipe_file: Path,
    right: str,
    wrong: str,
    sentence: str,
) -> None:
    source.put("a.jsonl", rows(4, "a"))
    sync()
    recipe_file.write_text(recipe_file.read_text().replace(right, wrong))
    failure = materialize(["a"]).failure_data_for_node("completion_files")
    assert failure is not None
    assert failure.user_failure_data is not None
    assert sentence in (failure.user_failure_data.description or "")
