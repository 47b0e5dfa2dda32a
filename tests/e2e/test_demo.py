"""The demo keeps its promises, and a second telling redoes nothing."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from demo.report import DemoReport
from dflash_core.drafter.folder import load_drafter

pytestmark = [pytest.mark.services, pytest.mark.timeout(2400)]

Told = subprocess.CompletedProcess[str]
Tell = Callable[[], Told]


def report_of(project: Path) -> DemoReport:
    return DemoReport.model_validate_json((project / ".dflash/demo/report.json").read_bytes())


def test_the_story_holds(told: Told, project: Path) -> None:
    assert told.returncode == 0, told.stdout
    report = report_of(project)
    assert report.broken_promises() == []
    assert report.rows_rejected >= 1
    assert "FAILS: part-03" in told.stdout
    assert "part-03 generated again" in told.stdout


def test_what_it_exported_loads(told: Told, project: Path) -> None:
    config = load_drafter(project / ".dflash/demo/drafter").config
    assert config.block_size == 8


def test_telling_it_again_redoes_nothing(told: Told, tell: Tell, project: Path) -> None:
    first = report_of(project)
    again = tell()
    assert again.returncode == 0, again.stdout
    second = report_of(project)
    differing = {"wall_s", "repair_s", "ui_url"}
    assert second.model_dump(exclude=differing) == first.model_dump(exclude=differing), "the training's seconds, too"
    for done in ("0 of 8 files to", "0 of them new", "failed in an earlier run"):
        assert done in again.stdout, again.stdout
