"""A real browser drives the running UI: lineage in flow order, a partition materialized from the dialog, its metadata.

With `--screenshots DIR` the pictures of the documentation are taken again.
"""

import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from dflash_assets.dev import dagster_ui
from dflash_assets.graphql import Dagster
from dflash_core.workspace import open_workspace

pytestmark = [pytest.mark.services, pytest.mark.timeout(1500)]  # the demo, where no other test has told it

RECIPE = Path("recipes/demo.toml")
PARTITION = "part-03"
FLOW = (
    "raw_completions",
    "tokenized_shards",
    "loss_mask_stats",
    "training_set",
    "drafter_checkpoint",
    "drafter_eval",
    "drafter_export",
)


@pytest.fixture(scope="module")
def ui(told: "subprocess.CompletedProcess[str]", project: Path) -> Iterator[Dagster]:
    """The UI over everything the demo left behind."""
    assert told.returncode == 0, told.stdout
    with (
        chdir(project),
        open_workspace(RECIPE) as workspace,
        dagster_ui(RECIPE, 0, workspace.access, project / "dagster.log") as running,
    ):
        running.wait_until_loaded()
        yield running


def test_the_lineage_shows_every_asset_in_flow_order(ui: Dagster, page: Page, screenshots: Path) -> None:
    page.set_viewport_size({"width": 1700, "height": 920})
    page.goto(f"{ui.url}/asset-groups")
    places = []
    for asset in FLOW:
        node = page.locator("[class*=AssetNode], foreignObject, svg").get_by_text(asset, exact=True).first
        expect(node).to_be_visible()
        box = node.bounding_box()
        assert box is not None
        places.append(box["x"])
    page.wait_for_timeout(5_000)  # the colours come with the second answer
    page.screenshot(path=screenshots / "lineage.png", clip={"x": 0, "y": 0, "width": 1700, "height": 680})
    expect(page.get_by_text("drafter_coverage", exact=True).first).to_be_visible()
    assert places == sorted(places), dict(zip(FLOW, places, strict=True))


def test_a_partition_is_materialized_from_the_dialog(ui: Dagster, page: Page, screenshots: Path) -> None:
    before = ui.last_materialization("tokenized_shards", PARTITION)
    page.goto(f"{ui.url}/assets/tokenized_shards?view=partitions")
    page.locator("button", has_text="Materialize").first.click()
    page.get_by_text("Select a partition or create one").click()
    page.locator("[role=menuitem]", has_text=PARTITION).click()
    expect(page.get_by_text("1 partition", exact=True)).to_be_visible()
    page.screenshot(path=screenshots / "materialize.png")
    # The open list may cover the button, depending on where the browser places it.
    page.locator("button", has_text=re.compile("^Launch")).last.dispatch_event("click")

    deadline = time.monotonic() + 180
    while ui.last_materialization("tokenized_shards", PARTITION) == before:
        assert time.monotonic() < deadline, "the partition was not materialized"
        time.sleep(1)

    page.goto(f"{ui.url}/assets/loss_mask_stats?view=partitions&partition={PARTITION}")
    expect(page.get_by_text("median supervised tokens").first).to_be_visible()
    page.goto(f"{ui.url}/assets/tokenized_shards?view=partitions&partition={PARTITION}")
    for entry in ("rows read", "rows rejected", "tokens", "sha256", "fingerprint"):
        expect(page.get_by_text(entry, exact=True).first).to_be_visible()


def test_the_gates_verdict_is_on_the_page(ui: Dagster, page: Page) -> None:
    page.goto(f"{ui.url}/assets/training_set?view=checks&checkDetail=gate")
    expect(page.get_by_text("The recipe's thresholds hold.").first).to_be_visible()
    expect(page.get_by_text("Passed", exact=True).first).to_be_visible()


def test_a_files_page_says_how_well_the_drafter_learned_it(ui: Dagster, page: Page, screenshots: Path) -> None:
    page.goto(f"{ui.url}/assets/drafter_coverage?view=partitions&partition={PARTITION}")
    for entry in ("mean loss", "joint accepted prefix", "training set", "checkpoint"):
        expect(page.get_by_text(entry, exact=True).first).to_be_visible()
    page.screenshot(path=screenshots / "coverage.png", clip={"x": 0, "y": 0, "width": 1600, "height": 720})
