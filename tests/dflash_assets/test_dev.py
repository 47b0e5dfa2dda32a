"""`make dev` ends when Dagster does."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dflash_assets import dev
from dflash_assets.graphql import Dagster
from dflash_core.errors import UserError


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
        dev._serve(Path("recipe.toml"), 0)
