"""A day with the UI, in a real browser: backfill, three failures, their reasons, the rerun, the gate, plots, training.

docs/operating.md tells the same walk to people; `--screenshots=docs` takes its pictures again.
"""

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Locator, Page, expect

from dflash_core.storage.layout import RUNS
from tests.e2e.walking import BAD, FILES, World, partitions, walking

pytestmark = [pytest.mark.walk, pytest.mark.timeout(600)]

FILE_ASSETS = ("raw_completions", "tokenized_shards", "loss_mask_stats")
TIMEOUT_S = 240.0
WIDTH, HEIGHT = 1400, 850
PLACE = 'repositoryName: "__repository__", repositoryLocationName: "dflash"'
STATES = f"""query($name: String!) {{
  sensors: sensorOrError(sensorSelector: {{{PLACE}, sensorName: $name}}) {{
    ... on Sensor {{ state: sensorState {{ status }} }} }}
  schedules: scheduleOrError(scheduleSelector: {{{PLACE}, scheduleName: $name}}) {{
    ... on Schedule {{ state: scheduleState {{ status }} }} }} }}"""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with walking(tmp_path_factory.mktemp("walk")) as made:
        yield made


@pytest.fixture
def page(page: Page) -> Page:
    page.set_viewport_size({"width": WIDTH, "height": HEIGHT})
    return page


@pytest.fixture
def shot(page: Page, screenshots: Path) -> Callable[[str, int], None]:
    """Take a picture of the upper part of the page."""

    def take(name: str, height: int = HEIGHT) -> None:
        page.wait_for_timeout(1_000)  # fonts, spinners, toasts
        page.screenshot(path=screenshots / f"{name}.png", clip={"x": 0, "y": 0, "width": WIDTH, "height": height})

    return take


Shot = Callable[..., None]


def until(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.5)


def open_dialog(page: Page, world: World) -> Locator:
    """The dialog for the three assets that are made file by file, opened from the lineage."""
    page.goto(f"{world.ui.url}/asset-groups")
    first, _, last = (page.locator("svg").get_by_text(name, exact=True).first for name in FILE_ASSETS)
    last.click()  # the panel that opens covers what is further to the right
    first.click(modifiers=["Shift"])
    page.locator("button", has_text="Materialize selected (3)").click()
    return page.get_by_role("dialog")


def launch(dialog: Locator) -> None:
    # An open list may cover the button, depending on where the browser places it.
    dialog.locator("button", has_text=re.compile("^Launch")).dispatch_event("click")
    expect(dialog).not_to_be_visible()


def test_of_twelve_files_three_fail_with_their_reasons(world: World, page: Page, shot: Shot) -> None:
    dialog = open_dialog(page, world)
    dialog.get_by_text("All", exact=True).click()
    expect(dialog.get_by_text(f"{FILES} partitions", exact=True)).to_be_visible()
    shot("backfill")
    launch(dialog)
    until(lambda: world.ui.partitions("loss_mask_stats") == (FILES, FILES - len(BAD), len(BAD)), "three failed")

    page.goto(f"{world.ui.url}/assets/tokenized_shards?view=partitions")
    page.get_by_text(re.compile(r"^Materialized \(9\)")).click()
    for partition in BAD:
        expect(page.get_by_text(partition, exact=True).first).to_be_visible()
    expect(page.get_by_text("part-00", exact=True)).not_to_be_visible()
    page.get_by_text("part-07", exact=True).first.click()
    run = page.locator("a[href*='/runs/']", has_text=re.compile("^[0-9a-f]{8}$")).first
    expect(run).to_be_visible()
    shot("failed", 560)

    run.click()
    failure = page.get_by_text(re.compile("3 of 12 files failed")).first
    expect(failure).to_be_visible()
    for reason in ("damaged gzip", "empty completion", "invalid JSON"):
        expect(failure).to_contain_text(reason)
    failure.scroll_into_view_if_needed()
    shot("reason")


def test_the_gate_says_what_is_wrong(world: World, page: Page, shot: Shot) -> None:
    assert world.ui.wait_for_run(world.ui.materialize(["training_set"]), TIMEOUT_S).succeeded
    page.goto(f"{world.ui.url}/assets/training_set?view=checks&checkDetail=gate")
    expect(page.get_by_text(re.compile(r"9 of 12 files \(75.0 %\)")).first).to_be_visible()
    shot("gate", 640)


def test_failed_and_missing_are_exactly_the_repaired(world: World, page: Page, shot: Shot) -> None:
    before = world.ui.last_materialization("loss_mask_stats", "part-00")
    world.repair()
    dialog = open_dialog(page, world)
    dialog.get_by_text("Failed and missing", exact=True).click()
    expect(dialog.get_by_text(f"{len(BAD)} partitions", exact=True)).to_be_visible()
    for partition in BAD:
        expect(dialog.get_by_text(partition, exact=True).first).to_be_visible()
    shot("rerun")
    launch(dialog)
    until(lambda: world.ui.partitions("loss_mask_stats") == (FILES, FILES, 0), "all are green")
    assert world.ui.last_materialization("loss_mask_stats", "part-00") == before


def test_a_files_numbers_and_picture_are_on_its_page(world: World, page: Page, shot: Shot) -> None:
    page.goto(f"{world.ui.url}/assets/loss_mask_stats?view=partitions&partition={partitions()[7]}")
    expect(page.get_by_text("median supervised tokens").first).to_be_visible()
    page.get_by_text("[Show Markdown]").first.click()
    picture = page.get_by_role("dialog").locator("img")
    expect(picture).to_be_visible()
    assert picture.evaluate("image => image.naturalWidth") > 0
    shot("picture", 560)


def test_numbers_are_plotted_over_the_partitions(world: World, page: Page, shot: Shot) -> None:
    page.goto(f"{world.ui.url}/assets/loss_mask_stats")
    page.get_by_text("Plots", exact=True).first.click()
    expect(page.locator("canvas").first).to_be_visible()
    shot("plots")


@pytest.mark.parametrize(("kind", "name"), [("schedules", "rerun_failed_files"), ("sensors", "new_completion_files")])
def test_automation_is_switched_on_and_off(world: World, page: Page, shot: Shot, kind: str, name: str) -> None:
    def state() -> str:
        return str(world.ui.ask(STATES, name=name)[kind]["state"]["status"])

    page.goto(f"{world.ui.url}/automation")
    row = page.locator("[data-index]", has=page.locator(f"a[href$='/{kind}/{name}']"))
    switch = row.locator("label[class*=formatSwitch]")
    expect(switch).to_be_visible()
    assert state() == "STOPPED"
    switch.click()
    until(lambda: state() == "RUNNING", f"{name} is on")
    page.mouse.move(0, 0)
    if kind == "schedules":
        shot("automation", 480)
    switch.click()
    until(lambda: state() == "STOPPED", f"{name} is off")


def test_training_shows_its_steps_and_ends_when_told(world: World, page: Page, shot: Shot) -> None:
    assert world.ui.wait_for_run(world.ui.materialize(["training_set"]), TIMEOUT_S).succeeded
    run = world.ui.materialize(["drafter_checkpoint"])
    page.goto(f"{world.ui.url}/runs/{run}")
    expect(page.get_by_text(re.compile(r"step 1/")).first).to_be_visible(timeout=1e3 * TIMEOUT_S)
    page.wait_for_timeout(15_000)
    shot("training")

    page.locator("button", has_text="Terminate").first.click()
    dialog = page.get_by_role("dialog")
    expect(dialog.get_by_text(re.compile("1 run will be terminated"))).to_be_visible()
    shot("terminate", 560)
    dialog.locator("button", has_text="Terminate 1 run").click()

    ended = world.ui.wait_for_run(run, TIMEOUT_S)
    assert not ended.succeeded
    saved = [key for key, _, _ in world.workspace.derived.list(RUNS)]
    assert saved, "the terminated training left its checkpoint"
