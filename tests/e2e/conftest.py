"""A copy of the project's own files in a folder of its own, with the demo told in it once."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

REPOSITORY = Path(__file__).resolve().parents[2]
DEMO_TIMEOUT_S = 1400
QUIET = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)

Told = subprocess.CompletedProcess[str]
Tell = Callable[[], Told]


@pytest.fixture(scope="session")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a user has after cloning, without the virtual environment and without any state."""
    folder = tmp_path_factory.mktemp("project")
    for name in ("dagster.yaml", "workspace.yaml", "pyproject.toml", "recipes", "demo"):
        path = REPOSITORY / name
        if path.is_dir():
            shutil.copytree(path, folder / name)
        else:
            shutil.copy(path, folder / name)
    return folder


@pytest.fixture(scope="session")
def environment() -> dict[str, str]:
    """Without the AWS variables of the test session's own store."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "DAGSTER_", "DFLASH_"))}


@pytest.fixture(scope="session")
def tell(project: Path, environment: dict[str, str]) -> Tell:
    """What `make demo` runs, in the project folder, without a terminal."""
    return lambda: subprocess.run(
        [sys.executable, "-m", "demo.story"],
        cwd=project,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=DEMO_TIMEOUT_S,
        check=False,
    )


@pytest.fixture(scope="session")
def told(tell: Tell) -> Told:
    """The demo, told once; its state stays in the project folder."""
    return tell()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Debian's Chromium; not for the whole session, since playwright keeps an event loop running."""
    executable = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if executable is None:
        pytest.fail("no Chromium on this machine; `make browser` installs Debian's")
    expect.set_options(timeout=60_000)
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=executable, args=QUIET)
        yield launched
        launched.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    opened = browser.new_page(viewport={"width": 1600, "height": 1000})
    opened.set_default_timeout(60_000)
    yield opened
    opened.close()


@pytest.fixture
def screenshots(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    folder: Path = request.config.getoption("--screenshots") or tmp_path
    folder.mkdir(parents=True, exist_ok=True)
    return folder
