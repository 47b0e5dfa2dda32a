"""A real PostgreSQL (Debian's) for one test session: a cluster of its own in a temporary folder, on loopback."""

import os
import pwd
import secrets
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg2
import pytest

from dflash_core.processes import free_ports, last_words, running_server

START_TIMEOUT_S = 60.0
USER = "dflash"


@contextmanager
def postgres() -> Iterator[dict[str, str]]:
    """The variables that name the running server and its empty database."""
    folder = Path(tempfile.mkdtemp(prefix="dflash-postgres-"))  # not pytest's, which other users may not enter
    try:
        prefix = _as_other_user(folder) if os.geteuid() == 0 else []
        variables = {
            "PGHOST": "127.0.0.1",
            "PGPORT": str(free_ports(1)[0]),
            "PGUSER": USER,
            "PGPASSWORD": secrets.token_hex(16),
            "PGDATABASE": "postgres",
        }
        password = folder / "password"
        password.write_text(variables["PGPASSWORD"])
        binaries = _binaries()
        initdb = [f"{binaries}/initdb", "-D", f"{folder}/data", "-U", USER, "-A", "scram-sha-256", "--no-sync"]
        subprocess.run([*prefix, *initdb, f"--pwfile={password}"], check=True, stdout=subprocess.DEVNULL)
        server = [f"{binaries}/postgres", "-D", f"{folder}/data", "-h", "127.0.0.1", "-p", variables["PGPORT"]]
        log = folder / "log"
        with running_server([*prefix, *server, "-k", str(folder), "-c", "fsync=off"], "INT", 10.0, log) as process:
            deadline = time.monotonic() + START_TIMEOUT_S
            while not _answers(variables):
                if process.poll() is not None or time.monotonic() > deadline:
                    pytest.fail(f"PostgreSQL did not start: {last_words(log)}")
                time.sleep(0.1)
            yield variables
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def query(variables: dict[str, str], statement: str) -> list[tuple[object, ...]]:
    """What one statement answers."""
    connection = psycopg2.connect(
        host=variables["PGHOST"],
        port=variables["PGPORT"],
        user=variables["PGUSER"],
        password=variables["PGPASSWORD"],
        dbname=variables["PGDATABASE"],
    )
    try:
        with connection.cursor() as cursor:
            cursor.execute(statement)
            return cursor.fetchall()
    finally:
        connection.close()


def _answers(variables: dict[str, str]) -> bool:
    try:
        return query(variables, "select 1") == [(1,)]
    except psycopg2.OperationalError:
        return False


def _as_other_user(folder: Path) -> list[str]:
    """PostgreSQL refuses to run as root: the package's own user owns the folder and runs it."""
    user = pwd.getpwnam("postgres")
    os.chown(folder, user.pw_uid, user.pw_gid)
    folder.chmod(0o755)
    return ["setpriv", f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups"]


def _binaries() -> str:
    """Debian keeps the servers' programs off the path."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"))
    if not found:
        pytest.fail("no PostgreSQL on this machine; `make postgres` installs Debian's")
    return str(found[-1].parent)
