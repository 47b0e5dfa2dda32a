"""Numbers of a running training in Dagster while it runs: each report of the process becomes an observation.

The trade-off: an observation is an event in Dagster's database, so the process reports seldom, not every step.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import dagster as dg

from dflash_core.training.ticking import ticking

POLL_S = 2.0


@contextmanager
def observed(context: dg.AssetExecutionContext, asset_key: dg.AssetKey, session: dg.PipesSession) -> Iterator[None]:
    """While the context lasts, log the session's custom messages (tables of numbers) as observations of the asset."""
    seen = 0

    def follow() -> None:
        nonlocal seen
        messages = list(session.get_custom_messages())
        for message in messages[seen:]:
            context.log_event(dg.AssetObservation(asset_key, metadata=_readable(message)))
        seen = len(messages)

    with ticking(follow, POLL_S, "observations"):
        yield


def _readable(numbers: dict[str, Any]) -> dict[str, float]:
    """Names as people write them, held_out/loss is "held out loss", and four digits, but all of a count."""
    return {
        name.replace("/", " ").replace("_", " "): float(value if float(value).is_integer() else f"{value:.4g}")
        for name, value in numbers.items()
    }
