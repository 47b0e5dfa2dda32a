"""`make dev` ends when Dagster does, and Dagster gets the access to the store and none of the user's own."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dflash_assets import dev
from dflash_assets.graphql import Dagster
from dflash_core.errors import UserError
from dflash_core.processes import running_server
from dflash_core.storage.s3 import NOTHING_SAID, Access


@pytest.mark.timeout(60)
def test_a_dagster_that_ends_by_itself_ends_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def running(*arguments: object, **options: object) -> Iterator[tuple[Dagster, "subprocess.Popen[bytes]"]]:
        with subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"]) as process:
            yield Dagster("http://127.0.0.1:9"), process

    monkeypatch.setattr(dev, "_running", running)
    monkeypatch.setattr(dev, "switch_on", lambda ui: None)
    monkeypatch.setattr(Dagster, "wait_until_loaded", lambda ui: None)
    with pytest.raises(UserError, match="exit code 3"):
        dev._serve(Path("recipe.toml"), 0, NOTHING_SAID)


@pytest.mark.parametrize("complete", [True, False], ids=["the embedded store", "what boto3 finds"])
def test_dagster_is_given_the_access(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, complete: bool) -> None:
    def tell_environment(command: list[str], *arguments: Any) -> object:
        program = "import json, os; print(json.dumps(dict(os.environ)))"
        return running_server([sys.executable, "-c", program], *arguments)

    users = {"AWS_PROFILE": "mine", "AWS_SESSION_TOKEN": "mine", "AWS_ENDPOINT_URL_S3": "http://mine.test"}
    for name, value in users.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(dev, "running_server", tell_environment)
    monkeypatch.setattr(Dagster, "answers", lambda ui: False)
    access = Access("http://127.0.0.1:9", "us-east-1", None, "key", "secret", past_proxies=True)
    log = tmp_path / "log"
    with (
        pytest.raises(UserError, match="did not come up"),
        dev.dagster_ui(Path("recipe.toml"), 0, access if complete else NOTHING_SAID, log),
    ):
        pass
    given = json.loads(log.read_text())
    assert given["DFLASH_RECIPE"] == str(tmp_path / "recipe.toml")
    if complete:
        assert {name for name in given if name.startswith("AWS_")} == {
            n for n in access.environment() if n != "NO_PROXY"
        }
        assert given.items() >= access.environment().items()
    else:
        assert given.items() >= users.items()
