"""Told at once: a failed run's reasons go to the recipe's webhook, as JSON or in Slack's format.

A webhook that fails is logged and forgotten; its address is never written anywhere. No redirect is followed, no proxy
asked, and what is or resolves to a metadata service is not told.
"""

from typing import Any

import dagster as dg
import httpx2

from dflash_core.http import AddressRefused, pinned_client
from dflash_core.recipe import AlertSettings

LINES = 20
"""Failed files named in a message."""


def alert_sensor(alerts: AlertSettings) -> dg.SensorDefinition:
    """Post what failed and why to `alerts.webhook_url`, as the recipe named it when the code location was loaded.

    Read once: a run that fails because somebody broke the recipe must be told, too.
    """

    @dg.run_failure_sensor(minimum_interval_seconds=15)
    def tell_of_failed_runs(context: dg.RunFailureSensorContext) -> dg.SkipReason | None:
        """Tell the recipe's webhook what failed and why."""
        if alerts.webhook_url is None:
            return dg.SkipReason("the recipe names no alerts.webhook_url")
        problem = post(alerts, message(context, alerts))
        if problem is not None:
            context.log.warning(f"the webhook was not told of run {context.dagster_run.run_id}: {problem}")
        return None

    return tell_of_failed_runs


def message(context: dg.RunFailureSensorContext, alerts: AlertSettings) -> dict[str, Any]:
    """What there is to tell of a failed run."""
    run = context.dagster_run
    steps = context.get_step_failure_events()
    failed: dict[str, str] = {}
    reasons = []
    for event in steps:
        data = event.step_failure_data
        user = data.user_failure_data
        reasons.append((user and user.description) or (data.error.message.strip() if data.error else "unknown"))
        entry = user.metadata.get("failed files") if user else None
        if isinstance(entry, dg.TableMetadataValue):
            failed |= {str(record.data["partition"]): str(record.data["reason"]) for record in entry.records}
    return {
        "run": run.run_id,
        "job": run.job_name,
        "assets": sorted(key.to_user_string() for key in run.asset_selection or ()),
        "reason": "; ".join(reasons) or context.failure_event.message or "the run died",
        "failed": failed,
        "url": f"{alerts.ui_url.rstrip('/')}/runs/{run.run_id}" if alerts.ui_url else None,
    }


def post(alerts: AlertSettings, told: dict[str, Any]) -> str | None:
    """Send a message; what went wrong, or None. Never raises and never names the address."""
    assert alerts.webhook_url is not None
    body = _slack(told) if alerts.format == "slack" else told
    url = alerts.webhook_url.get_secret_value()
    try:
        with pinned_client(alerts.timeout_s) as client:
            answer = client.post(url, json=body)
    except AddressRefused:
        return "its address is a link-local or metadata one, which is never talked to"
    except httpx2.TimeoutException:
        return f"no answer within {alerts.timeout_s:g} s"
    except (httpx2.HTTPError, httpx2.InvalidURL, OSError, ValueError) as error:
        return f"it cannot be reached ({type(error).__name__})"
    return None if answer.is_success else f"it answered {answer.status_code}"


def _slack(told: dict[str, Any]) -> dict[str, str]:
    failed: dict[str, str] = told["failed"]
    lines = [f"• {partition}: {reason}" for partition, reason in list(failed.items())[:LINES]]
    if len(failed) > LINES:
        lines.append(f"• and {len(failed) - LINES} more")
    head = f"*{told['job']}* run {told['run'][:8]} failed" + (f" (<{told['url']}|open>)" if told["url"] else "")
    return {"text": "\n".join([head, *(lines or [told["reason"]])])}
