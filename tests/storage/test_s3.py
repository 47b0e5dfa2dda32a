"""Reads are verified, writes are whole, and every failure is one sentence about what, where and what to do."""

import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dflash_core.errors import ObjectChanged, ObjectCorrupt, ObjectMissing, RecipeError, StorageError
from dflash_core.recipe import StorageSettings
from dflash_core.records import Reject, StoredObject
from dflash_core.storage.s3 import Access, Store, make_client

LARGE = bytes(range(256)) * 4000


def test_what_is_written_is_read(s3: Store) -> None:
    stored = s3.put("a/b%2Fc.bin", b"payload")
    assert s3.read(stored) == b"payload"
    assert s3.holds(stored)
    assert list(s3.list("a/")) == [("a/b%2Fc.bin", 7, s3.get("a/b%2Fc.bin").etag)]


def test_damage_is_named(s3: Store) -> None:
    stored = s3.put("a", b"payload")
    s3.put("a", b"paYload")
    assert not s3.holds(stored)
    with pytest.raises(ObjectCorrupt, match=r"derived/a has 7 bytes .* rematerialize"):
        s3.read(stored)


def test_missing_and_changed_objects_are_told_apart(s3: Store) -> None:
    with pytest.raises(ObjectMissing):
        s3.get("nothing")
    s3.put("a", b"one")
    etag = s3.get("a").etag
    s3.put("a", b"two")
    with pytest.raises(ObjectChanged, match="run this partition again"):
        s3.get("a", etag=etag)
    assert not s3.holds(StoredObject(key="nothing", size=1, sha256="0"))


def test_records_round_trip_and_foreign_json_is_refused(s3: Store) -> None:
    s3.put_record("r", Reject(line=3, reason="blank"))
    assert s3.get_record("r", Reject) == Reject(line=3, reason="blank")
    s3.put("r", b'{"line": 3, "reason": "blank", "new_field": 1}')
    with pytest.raises(ObjectCorrupt, match="not a Reject this version can read"):
        s3.get_record("r", Reject)
    assert s3.find_record("r", Reject) is None


def test_missing_bucket(s3: Store) -> None:
    with pytest.raises(StorageError, match="bucket 'no-such-bucket' does not exist"):
        list(Store(s3.client, "no-such-bucket").list())


def test_wrong_credentials(access: Access, s3: Store) -> None:
    wrong = Store(make_client(StorageSettings(bucket=s3.bucket), replace(access, secret_key="wrong")), s3.bucket)
    with pytest.raises(StorageError, match="refuses the credentials"):
        list(wrong.list())


def test_unreachable_endpoint(access: Access) -> None:
    nowhere = StorageSettings(bucket="bucket", endpoint_url="http://127.0.0.1:9", attempts=1, connect_timeout_s=1)
    with pytest.raises(StorageError, match="check the endpoint"):
        Store(make_client(nowhere), "bucket").get("a")


@pytest.mark.parametrize("url", ["file:///etc", "http://169.254.169.254", "ftp://x", "http://"])
def test_endpoints_that_are_not_an_s3_service_are_refused(url: str) -> None:
    with pytest.raises(RecipeError, match="endpoint_url"):
        make_client(StorageSettings(bucket="bucket", endpoint_url=url))


def test_a_store_whose_name_is_that_of_a_metadata_service_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    real = socket.getaddrinfo

    def resolve(host: str, *rest: Any, **named: Any) -> Any:
        return real("169.254.169.254" if host == "metadata.example" else host, *rest, **named)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    for host in ("metadata.example", "2852039166"):
        with pytest.raises(RecipeError, match=rf"endpoint_url names {host}, which is 169\.254\.169\.254"):
            make_client(StorageSettings(bucket="b", endpoint_url=f"http://{host}"))


def test_what_is_uploaded_is_downloaded(s3: Store, tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(LARGE)
    s3.download(s3.upload("a", tmp_path / "in"), tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == LARGE


def test_the_short_file_of_a_killed_download_is_never_taken_for_the_whole(s3: Store, tmp_path: Path) -> None:
    stored = s3.put("a", LARGE)
    (tmp_path / ".out.part").write_bytes(LARGE[:1000])
    s3.download(stored, tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == LARGE
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_object_that_is_not_the_named_one_leaves_no_file(s3: Store, tmp_path: Path) -> None:
    stored = s3.put("a", LARGE)
    s3.put("a", LARGE[::-1])
    with pytest.raises(ObjectCorrupt, match="not what its manifest says"):
        s3.download(stored, tmp_path / "out")
    with pytest.raises(ObjectMissing):
        s3.download(StoredObject(key="b", size=1, sha256="0"), tmp_path / "out")
    assert not list(tmp_path.iterdir())
