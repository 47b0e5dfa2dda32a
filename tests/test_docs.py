"""The documentation speaks of what is there: links, pictures, commands, names in the UI."""

import re
from pathlib import Path

import pytest
import typer

from dflash_assets.cli import app
from dflash_assets.definitions import defs

REPOSITORY = Path(__file__).resolve().parent.parent
PAGES = sorted([REPOSITORY / "README.md", *(REPOSITORY / "docs").glob("*.md"), *(REPOSITORY / "deploy").glob("*.md")])


@pytest.fixture(params=PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def page(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


def test_links_and_pictures_are_there(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text())
    assert [t for t in targets if "://" not in t and not (page.parent / t).exists()] == []


def test_commands_exist(page: Path) -> None:
    known = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    spoken = set(re.findall(r"(?:^|`|/)dflash ([a-z][a-z-]+)", page.read_text(), re.MULTILINE))
    assert spoken <= set(known), spoken - set(known)


def test_what_runs_by_itself_is_described_by_name() -> None:
    repository = defs.get_repository_def()
    names = {one.name for one in (*repository.sensor_defs, *repository.schedule_defs)}
    text = (REPOSITORY / "docs/operating.md").read_text()
    assert [name for name in sorted(names) if f"`{name}`" not in text] == []


def test_every_asset_is_described() -> None:
    text = (REPOSITORY / "docs/operating.md").read_text()
    assets = {key.to_user_string() for key in defs.resolve_asset_graph().get_all_asset_keys()}
    assert [name for name in sorted(assets) if f"`{name}`" not in text] == []
