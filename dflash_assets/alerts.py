"""Told at once: a failed run's reasons go to the recipe's webhook, as JSON or in Slack's format.

A webhook that fails is logged and forgotten; its address is never written anywhere. No redirect is followed, no proxy
asked, and what is or resolves to a metadata service is not told.
"""

import json
import socket
import urllib.error
import urllib.request
from http.client import HTTPException
from typing import Any
from urllib.parse import urlsplit

import dagster as dg

from dflash_core.recipe import Alerts
from dflash_core.storage.addresses import NoRedirect, is_refused

LINES = 20
"""Failed files named in a message."""


def alert_sensor(alerts: Alerts) -> dg.SensorDefinition:
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


def message(context: dg.RunFailureSensorContext, alerts: Alerts) -> dict[str, Any]:
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


def post(alerts: Alerts, told: dict[str, Any]) -> str | None:
    """Send a message; what went wrong, or None. Never raises and never names the address."""
    assert alerts.webhook_url is not None
    body = _slack(told) if alerts.format == "slack" else told
    url = alerts.webhook_url.get_secret_value()
    opener = urllib.request.build_opener(NoRedirect(), urllib.request.ProxyHandler({}))
    try:
        found = socket.getaddrinfo(urlsplit(url).hostname, None, type=socket.SOCK_STREAM)
        if any(is_refused(str(entry[4][0])) for entry in found):
            return "its address is a link-local or metadata one, which is never talked to"
        request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
        with opener.open(request, timeout=alerts.timeout_s):
            return None
    except urllib.error.HTTPError as error:
        return f"it answered {error.code}"
    except TimeoutError:
        return f"no answer within {alerts.timeout_s:g} s"
    except (OSError, ValueError, HTTPException) as error:
        return f"it cannot be reached ({type(error).__name__})"


def _slack(told: dict[str, Any]) -> dict[str, str]:
    failed: dict[str, str] = told["failed"]
    lines = [f"• {partition}: {reason}" for partition, reason in list(failed.items())[:LINES]]
    if len(failed) > LINES:
        lines.append(f"• and {len(failed) - LINES} more")
    head = f"*{told['job']}* run {told['run'][:8]} failed" + (f" (<{told['url']}|open>)" if told["url"] else "")
    return {"text": "\n".join([head, *(lines or [told["reason"]])])}
