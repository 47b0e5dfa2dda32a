"""Fixtures for the whole suite: one real embedded store a session, an empty bucket a test, and the sample data."""

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import settings

from dflash_core.recipe import StorageSettings
from dflash_core.storage.embedded import embedded_store
from dflash_core.storage.s3 import Access, Store, make_client

REPOSITORY = Path(__file__).resolve().parent.parent
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# A machine shared with other jobs is slow now and then: a test's time limit is pytest's, not a deadline an example.
# The same examples everywhere; `--hypothesis-profile=search` looks for new ones.
settings.register_profile("search", deadline=None)
settings.register_profile("dflash", deadline=None, derandomize=True)
settings.load_profile("dflash")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--material",
        type=Path,
        default=REPOSITORY.parent / "shared",
        help="the folder with sample data and tokenizers (with =)",
    )
    parser.addoption("--screenshots", type=Path, default=None, help="keep the browser tests' pictures in this folder")


@pytest.fixture(scope="session")
def material(request: pytest.FixtureRequest) -> Path:
    """The folder with real completions, tokenizers and golden numbers; its tests skip where it is absent."""
    folder: Path = request.config.getoption("--material")
    if not (folder / "data").is_dir():
        pytest.skip(f"no sample data in {folder}; give the folder with --material")
    return folder.resolve()


@pytest.fixture(scope="session")
def access(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Access]:
    """A real S3 service on loopback; the AWS variables name it, and nothing else, while the session runs."""
    with embedded_store(tmp_path_factory.mktemp("store")) as running, pytest.MonkeyPatch.context() as environment:
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            environment.delenv(name)
        for name, value in running.environment().items():
            environment.setenv(name, value)
        yield running


class Buckets:
    """Empty buckets of this session's store, used again and again: the first object in a new one costs 0.2 s, and the
    server has a limited number of volumes.
    """

    def __init__(self) -> None:
        self._client = make_client(StorageSettings(bucket="any"))
        self._idle: list[str] = []

    @contextmanager
    def lend(self) -> Iterator[str]:
        """An empty bucket, nobody else's while the context lasts."""
        name = self._idle.pop() if self._idle else self._make()
        yield name
        for page in self._client.get_paginator("list_objects_v2").paginate(Bucket=name):
            keys = [{"Key": found["Key"]} for found in page.get("Contents", [])]
            if keys:
                self._client.delete_objects(Bucket=name, Delete={"Objects": keys, "Quiet": True})
        self._idle.append(name)

    def _make(self) -> str:
        name = f"test-{uuid.uuid4().hex[:12]}"
        self._client.create_bucket(Bucket=name)
        return name


@pytest.fixture(scope="session")
def buckets(access: Access) -> Buckets:
    """Where tests get their buckets from."""
    return Buckets()


@pytest.fixture
def bucket(buckets: Buckets) -> Iterator[str]:
    """An empty bucket."""
    with buckets.lend() as name:
        yield name


@pytest.fixture(scope="module")
def module_bucket(buckets: Buckets) -> Iterator[str]:
    """A bucket for all tests of a module, which only read what one fixture put there."""
    with buckets.lend() as name:
        yield name


@pytest.fixture
def s3(bucket: str) -> Store:
    """A store on an empty bucket, with a prefix."""
    return Store(make_client(StorageSettings(bucket=bucket)), bucket, "derived/")
