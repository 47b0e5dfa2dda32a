"""The embedded store is real, private and never outlives who started it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import boto3
import psutil
import pytest
from botocore.exceptions import ClientError

from dflash_core.recipe import StorageSettings
from dflash_core.storage.embedded import embedded_store
from dflash_core.storage.s3 import Access, make_client

HOLD = """
import sys, time
from pathlib import Path
from dflash_core.storage.embedded import embedded_store
with embedded_store(Path(sys.argv[1])):
    print("ready", flush=True)
    time.sleep(600)
"""


def servers_of(folder: Path) -> list[psutil.Process]:
    return [
        p
        for p in psutil.process_iter(["cmdline"])
        if any(str(folder) in part for part in p.info["cmdline"] or []) and "weed" in str(p.info["cmdline"][0])
    ]


def test_listens_on_loopback_only(access: Access, tmp_path_factory: pytest.TempPathFactory) -> None:
    servers = servers_of(tmp_path_factory.getbasetemp())
    listening = [c.laddr for p in servers for c in p.net_connections() if c.status == psutil.CONN_LISTEN]
    assert listening
    assert {address.ip for address in listening} == {"127.0.0.1"}


def test_refuses_a_stranger(access: Access) -> None:
    client = boto3.client(
        "s3",
        endpoint_url=access.endpoint_url,
        region_name="us-east-1",
        aws_access_key_id=access.access_key,
        aws_secret_access_key="wrong",
    )
    with pytest.raises(ClientError):
        client.list_buckets()


def test_a_second_comer_attaches(access: Access, tmp_path: Path) -> None:
    with embedded_store(tmp_path) as first, embedded_store(tmp_path) as second:
        assert first == second


def test_the_environment_stays_as_it_is(access: Access, tmp_path: Path) -> None:
    before = dict(os.environ)
    with embedded_store(tmp_path) as other:
        assert dict(os.environ) == before
        client = make_client(StorageSettings(bucket="any"), other)
        assert client.meta.endpoint_url == other.endpoint_url != access.endpoint_url
    assert dict(os.environ) == before


def test_nothing_of_the_users_own_gets_in(access: Access, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "a profile that does not exist")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "mine")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9")
    for name in ("HTTP_PROXY", "http_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with embedded_store(tmp_path) as other:
        client = make_client(StorageSettings(bucket="any"), other)
        assert client.get_object(Bucket="dflash-ready", Key="ready")["Body"].read() == b"ready"


def test_ends_with_a_parent_that_was_killed_and_keeps_its_data(tmp_path: Path) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE)
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"ready\n"
    (server,) = servers_of(tmp_path)
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    deadline = time.monotonic() + 30
    while server.is_running() and server.status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not servers_of(tmp_path)
    with embedded_store(tmp_path) as again:
        client = make_client(StorageSettings(bucket="any"), again)
        assert client.get_object(Bucket="dflash-ready", Key="ready")["Body"].read() == b"ready"
