"""Reads are verified, writes are whole, and every failure is one sentence about what, where and what to do."""

import pytest

from dflash_core.errors import ObjectChanged, ObjectCorrupt, ObjectMissing, RecipeError, StorageError
from dflash_core.recipe import Storage
from dflash_core.records import Reject, StoredObject
from dflash_core.storage.embedded import Endpoint
from dflash_core.storage.store import Store, list_sources, make_client


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
    with pytest.raises(ObjectCorrupt, match="no Reject this version can read"):
        s3.get_record("r", Reject)
    assert s3.find_record("r", Reject) is None


def test_missing_bucket(s3: Store) -> None:
    with pytest.raises(StorageError, match="bucket 'no-such-bucket' does not exist"):
        list(Store(s3.client, "no-such-bucket").list())


def test_wrong_credentials(endpoint: Endpoint, s3: Store) -> None:
    wrong = Store(make_client(Storage(bucket=s3.bucket), credentials=(endpoint.access_key, "wrong")), s3.bucket)
    with pytest.raises(StorageError, match="refuses the credentials"):
        list(wrong.list())


def test_unreachable_endpoint(endpoint: Endpoint) -> None:
    nowhere = Storage(bucket="bucket", endpoint_url="http://127.0.0.1:9", attempts=1, connect_timeout_s=1)
    with pytest.raises(StorageError, match="check the endpoint"):
        Store(make_client(nowhere), "bucket").get("a")


@pytest.mark.parametrize("url", ["file:///etc", "http://169.254.169.254", "ftp://x", "http://"])
def test_endpoints_that_are_no_s3_service_are_refused(url: str) -> None:
    with pytest.raises(RecipeError, match="endpoint_url"):
        make_client(Storage(bucket="bucket", endpoint_url=url))


def test_sources_are_the_completion_files_sorted(s3: Store) -> None:
    for name in ("b.jsonl", "a/x,y.jsonl.gz", "notes.txt"):
        s3.put(name, b"{}")
    assert [(f.partition, f.key) for f in list_sources(s3)] == [
        ("a%2Fx%2Cy.jsonl.gz", "derived/a/x,y.jsonl.gz"),
        ("b", "derived/b.jsonl"),
    ]


def test_an_empty_prefix_says_so(s3: Store) -> None:
    with pytest.raises(StorageError, match="holds no file of completions"):
        list_sources(s3)
