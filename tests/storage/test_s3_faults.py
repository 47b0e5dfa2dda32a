"""Whatever happens on the way to the store, bytes are whole or the failure is one sentence, after bounded tries."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from dflash_core.errors import ObjectChanged, ObjectCorrupt, StorageError
from dflash_core.recipe import StorageSettings
from dflash_core.storage import s3 as s3_module
from dflash_core.storage.s3 import Access, Store, make_client
from tests.storage.proxy import Fault, Proxy, Request, Status, proxy_of

ATTEMPTS = 3
BODY = bytes(range(256)) * 40
LARGE = bytes(range(256)) * 4000


@pytest.fixture
def proxy(access: Access) -> Iterator[Proxy]:
    with proxy_of(access) as running:
        yield running


def behind(proxy: Proxy, bucket: str, **storage: object) -> Store:
    given = {"bucket": bucket, "endpoint_url": proxy.url, "attempts": ATTEMPTS, "read_timeout_s": 20.0, **storage}
    return Store(make_client(StorageSettings.model_validate(given)), bucket, "derived/", ATTEMPTS)


@pytest.fixture
def far(proxy: Proxy, bucket: str, monkeypatch: pytest.MonkeyPatch) -> Store:
    """The store as seen through the proxy."""
    monkeypatch.setattr(s3_module, "FIRST_PAUSE_S", 0.01)
    return behind(proxy, bucket)


def first(times: int, fault: Fault | Status, method: str = "GET"):
    """The fault for the first requests with a method; the ones after it are served."""
    return lambda request: fault if request.method == method and request.number < times else None


BURSTS = [Status(500, "InternalError"), Status(503, "SlowDown"), "drop"]


@pytest.mark.parametrize("fault", BURSTS, ids=str)
@pytest.mark.parametrize("method", ["GET", "PUT"])
def test_a_burst_of_errors_is_outlived(proxy: Proxy, far: Store, s3: Store, method: str, fault: Fault | Status) -> None:
    s3.put("a", BODY)
    proxy.script = first(ATTEMPTS - 1, fault, method)
    if method == "GET":
        assert far.get("a").body == BODY
    else:
        assert s3.read(far.put("b", BODY)) == BODY
    assert max(proxy.seen.values()) == ATTEMPTS


@pytest.mark.parametrize("fault", BURSTS, ids=str)
def test_errors_without_end_fail_after_bounded_tries_and_name_the_object(
    proxy: Proxy, far: Store, fault: Fault | Status
) -> None:
    proxy.script = lambda request: fault
    for act in (lambda: far.get("a"), lambda: far.put("b", BODY)):
        proxy.seen.clear()
        with pytest.raises(StorageError, match=r"(reading|writing) s3://test-.*/derived/[ab]"):
            act()
        assert sum(proxy.seen.values()) == ATTEMPTS


@pytest.mark.parametrize("fault", ["truncate", "no length", "stall"])
def test_a_body_that_breaks_off_is_read_again_and_never_used(
    proxy: Proxy, far: Store, s3: Store, bucket: str, fault: Fault
) -> None:
    s3.put("a", BODY)
    if fault == "stall":
        far = behind(proxy, bucket, read_timeout_s=2.0)
    if fault == "no length":
        far = behind(proxy, bucket, request_checksums=False)  # nothing else would notice it
    proxy.script = first(1, fault)
    assert far.get("a").body == BODY
    assert sum(proxy.seen.values()) == 2
    proxy.script = lambda request: fault
    proxy.seen.clear()
    with pytest.raises(StorageError, match=rf"derived/a: .* in each of {ATTEMPTS} tries"):
        far.get("a")
    assert sum(proxy.seen.values()) == ATTEMPTS


def test_an_object_replaced_between_two_tries_is_noticed(proxy: Proxy, far: Store, s3: Store) -> None:
    s3.put("a", BODY)
    etag = s3.get("a").etag

    def script(request: Request) -> Fault | None:
        if request.number:
            return None
        s3.put("a", BODY[::-1])
        return "truncate"

    proxy.script = script
    with pytest.raises(ObjectChanged, match="replaced since it was listed"):
        far.get("a", etag=etag)


def test_a_write_whose_answer_is_lost_is_there_once_and_whole(proxy: Proxy, far: Store, s3: Store) -> None:
    proxy.script = first(1, "lose answer", "PUT")
    stored = far.put("a", BODY)
    assert s3.read(stored) == BODY
    assert [key for key, _, _ in s3.list()] == ["a"]
    assert sum(proxy.seen.values()) == 2


def test_a_lost_answer_does_not_hide_who_was_first(proxy: Proxy, far: Store, s3: Store) -> None:
    proxy.script = first(1, "lose answer", "PUT")
    assert far.create("a", BODY), "the second try found its own first"
    assert not far.create("a", BODY[::-1])
    assert s3.get("a").body == BODY
    s3.put("b", BODY[::-1])
    assert not far.create("b", BODY)
    assert s3.get("b").body == BODY[::-1]


def test_a_byte_flipped_on_the_way_is_read_again(proxy: Proxy, far: Store, s3: Store) -> None:
    stored = s3.put("a", BODY)
    proxy.script = first(1, "flip")
    assert far.read(stored) == BODY
    proxy.script = lambda request: "flip"
    with pytest.raises(StorageError, match=r"derived/a: .*checksum"):
        far.read(stored)


def test_a_flipped_byte_that_no_checksum_of_the_store_shows_names_the_object(
    proxy: Proxy, s3: Store, bucket: str
) -> None:
    stored = s3.put("a", BODY)
    proxy.script = lambda request: "flip"
    with pytest.raises(ObjectCorrupt, match=r"derived/a has 10240 bytes .*damaged or overwritten; delete it, then rem"):
        behind(proxy, bucket, request_checksums=False).read(stored)


@pytest.mark.parametrize(
    ("code", "sentence"),
    [("ExpiredToken", "refuses the credentials"), ("AccessDenied", "access denied .* may not do this in bucket")],
)
def test_credentials_that_end_are_named_and_work_again_once_renewed(
    proxy: Proxy, far: Store, s3: Store, code: str, sentence: str
) -> None:
    s3.put("a", BODY)
    proxy.script = lambda request: Status(403, code)
    with pytest.raises(StorageError, match=sentence):
        far.get("a")
    proxy.script = lambda request: None
    assert far.get("a").body == BODY


def test_a_store_that_refuses_checksum_headers_names_the_switch_and_the_switch_works(
    proxy: Proxy, far: Store, s3: Store, bucket: str
) -> None:
    def refuse(request: Request) -> Status | None:
        checksummed = any(name.lower().startswith("x-amz-checksum") for name in request.headers)
        return Status(501, "NotImplemented") if checksummed else None

    proxy.script = refuse
    with pytest.raises(StorageError, match=r"storage\.request_checksums = false"):
        far.put("a", BODY)
    assert s3.read(behind(proxy, bucket, request_checksums=False).put("a", BODY)) == BODY


def test_a_listing_that_fails_halfway_is_not_a_short_list(proxy: Proxy, far: Store, s3: Store) -> None:
    s3.put("a", BODY)
    proxy.script = lambda request: Status(403, "AccessDenied")
    with pytest.raises(StorageError, match="listing"):
        list(far.list())


@pytest.mark.parametrize("fault", ["truncate", "drop", Status(503, "SlowDown")], ids=str)
def test_a_download_that_never_ends_well_leaves_what_was_there(
    proxy: Proxy, bucket: str, s3: Store, tmp_path: Path, fault: Fault | Status
) -> None:
    far, stored = behind(proxy, bucket, attempts=2), s3.put("a", LARGE)
    (tmp_path / "out").write_bytes(b"the last good one")
    proxy.script = lambda request: fault if request.method == "GET" else None
    with pytest.raises(StorageError, match=r"reading s3://.*/derived/a"):
        far.download(stored, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out").read_bytes() == b"the last good one"
    proxy.script = lambda request: None
    far.download(stored, tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == LARGE


def test_an_upload_whose_answer_is_lost_is_there_once_and_whole(
    proxy: Proxy, bucket: str, s3: Store, tmp_path: Path
) -> None:
    (tmp_path / "in").write_bytes(LARGE)
    proxy.script = first(1, "lose answer", "PUT")
    stored = behind(proxy, bucket, attempts=2).upload("a", tmp_path / "in")
    assert s3.read(stored) == LARGE
    assert [key for key, _, _ in s3.list()] == ["a"]
