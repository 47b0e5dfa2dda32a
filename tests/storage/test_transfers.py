"""A file appears only whole: whatever a download or an upload met on its way, or left behind when it was killed."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from dflash_core.errors import ObjectCorrupt, ObjectMissing, StorageError
from dflash_core.recipe import Storage
from dflash_core.records import StoredObject
from dflash_core.storage.embedded import Endpoint
from dflash_core.storage.store import Store, make_client
from dflash_core.storage.transfers import download_file, upload_file
from tests.storage.proxy import Proxy, Status, proxy_of

BODY = bytes(range(256)) * 4000


@pytest.fixture
def proxy(endpoint: Endpoint) -> Iterator[Proxy]:
    with proxy_of(endpoint.url) as running:
        yield running


@pytest.fixture
def far(proxy: Proxy, bucket: str) -> Store:
    settings = Storage(bucket=bucket, endpoint_url=proxy.url, attempts=2, read_timeout_s=20.0)
    return Store(make_client(settings), bucket, "derived/", 2)


def test_what_is_uploaded_is_downloaded(s3: Store, tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(BODY)
    download_file(s3, upload_file(s3, "a", tmp_path / "in"), tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == BODY


@pytest.mark.parametrize("fault", ["truncate", "drop", Status(503, "SlowDown")], ids=str)
def test_a_download_that_never_ends_well_leaves_what_was_there(
    proxy: Proxy, far: Store, s3: Store, tmp_path: Path, fault
) -> None:
    stored = s3.put("a", BODY)
    (tmp_path / "out").write_bytes(b"the last good one")
    proxy.script = lambda request: fault if request.method == "GET" else None
    with pytest.raises(StorageError, match=r"reading s3://.*/derived/a"):
        download_file(far, stored, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out").read_bytes() == b"the last good one"
    proxy.script = lambda request: None
    download_file(far, stored, tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == BODY


def test_the_short_file_of_a_killed_download_is_never_taken_for_the_whole(s3: Store, tmp_path: Path) -> None:
    stored = s3.put("a", BODY)
    (tmp_path / ".out.part").write_bytes(BODY[:1000])
    download_file(s3, stored, tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == BODY
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_object_that_is_not_the_named_one_leaves_no_file(s3: Store, tmp_path: Path) -> None:
    stored = s3.put("a", BODY)
    s3.put("a", BODY[::-1])
    with pytest.raises(ObjectCorrupt, match="not what its manifest says"):
        download_file(s3, stored, tmp_path / "out")
    with pytest.raises(ObjectMissing):
        download_file(s3, StoredObject(key="b", size=1, sha256="0"), tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_an_upload_whose_answer_is_lost_is_there_once_and_whole(
    proxy: Proxy, far: Store, s3: Store, tmp_path: Path
) -> None:
    (tmp_path / "in").write_bytes(BODY)
    proxy.script = lambda request: "lose answer" if request.method == "PUT" and not request.number else None
    stored = upload_file(far, "a", tmp_path / "in")
    assert s3.read(stored) == BODY
    assert [key for key, _, _ in s3.list()] == ["a"]
