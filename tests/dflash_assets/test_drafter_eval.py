"""The asset's checks: what must hold is red when it does not, and what could not be compared says so."""

from collections.abc import Callable
from typing import Any

import dagster as dg
import pytest

from dflash_assets import children
from dflash_assets import drafter_eval as module
from dflash_assets.drafter_export import drafter_export
from dflash_assets.resources import RecipeResource
from dflash_core.errors import UserError
from dflash_core.records import PreviousDrafter
from dflash_core.workspace import Workspace
from tests.make_report import make_report


@pytest.mark.parametrize(
    ("changes", "failed"),
    [
        ({}, set()),
        ({"acceptance_length": 1.9}, {"acceptance"}),
        ({"lossless": False, "differing_prompts": 1}, {"lossless"}),
        ({"lossless": False, "temperature": 1.0}, set()),
        (
            {
                "previous": PreviousDrafter(
                    verdict="worse",
                    reason="-0.50 (-0.80 to -0.20) against run test-0 on the same 2 prompts",
                    run="test-0",
                    acceptance_length=3.5,
                    difference=-0.5,
                    interval=(-0.8, -0.2),
                )
            },
            {"not_worse"},
        ),
    ],
    ids=["good", "below the threshold", "not lossless", "sampled", "worse than before"],
)
def test_checks(
    workspace: Workspace,
    resources: dict[str, RecipeResource],
    instance: dg.DagsterInstance,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    failed: set[str],
) -> None:
    report = make_report(workspace.derived, **changes)
    monkeypatch.setattr(children, "evaluate", lambda *arguments: report)
    done = dg.materialize(
        [module.drafter_eval],
        instance=instance,
        resources=resources,
        raise_on_error=False,
    )
    assert done.success is failed.isdisjoint({"acceptance", "lossless"}), "these two keep a run from exporting"
    checks = {check.check_name: check for check in done.get_asset_check_evaluations()}
    assert set(checks) == {"acceptance", "lossless", "not_worse"}
    assert {name for name, check in checks.items() if not check.passed} == failed
    assert (checks["not_worse"].description or "").startswith(report.previous.verdict)
    (event,) = done.asset_materializations_for_node("drafter_eval")
    assert event.metadata["acceptance length"].value == report.acceptance_length
    assert "base64" in str(event.metadata["picture"].value)
    assert event.metadata["acceptance length, 95 %"].value == "2.50 to 3.50"
    assert "too few prompts" in str(event.metadata["cuts"].value)
    assert event.metadata["cuts not made"].value == {"thinking": "no switch"}


def test_differences_in_reduced_precision_are_a_warning(workspace: Workspace) -> None:
    for dtype, severity in (("bfloat16", "WARN"), ("float32", "ERROR")):
        check = module._lossless(make_report(workspace.derived, dtype=dtype, lossless=False, differing_prompts=1))
        assert (check.passed, check.severity.value) == (False, severity)


@pytest.mark.parametrize("run", [None, "demo-0123456789ab"])
@pytest.mark.parametrize("asset", [module.drafter_eval, drafter_export], ids=lambda asset: asset.key.to_user_string())
def test_the_run_of_the_launchpad_is_the_drafter_of_the_core_call(
    resources: dict[str, RecipeResource],
    instance: dg.DagsterInstance,
    monkeypatch: pytest.MonkeyPatch,
    asset: dg.AssetsDefinition,
    run: str | None,
) -> None:
    asked: list[str | None] = []

    def start(function: Callable[..., object], workspace: Workspace, drafter: str | None, **options: object) -> None:
        asked.append(drafter)
        raise UserError("asked")

    monkeypatch.setattr(children, "run", start)
    config = {"ops": {asset.key.to_user_string(): {"config": {"run": run}}}}
    dg.materialize([asset], instance=instance, resources=resources, run_config=config, raise_on_error=False)
    assert asked == [run]
