"""How an asset of many files says which of them failed: on each file's page, and in one failure at the end."""

from collections.abc import Iterable, Iterator, Mapping

import dagster as dg

from dflash_assets.metadata import table

FAILED, STOPPED = "failed", "stopped before this file"
"""States of a file on its page."""


def observations(
    context: dg.AssetExecutionContext, partition: str, reason: str, etag: str | None
) -> Iterator[dg.AssetObservation]:
    """Why a file failed, on the page of its partition."""
    context.log.error(f"{partition}: {reason}")
    for key in sorted(context.selected_asset_keys):
        yield dg.AssetObservation(
            key, partition=partition, metadata={"state": FAILED, "reason": reason, "etag": etag or "none"}
        )


def stopped_before(asset: dg.AssetKey, partitions: Iterable[str], reason: str) -> Iterator[dg.AssetObservation]:
    """That a run ended before it came to these files, for a reason that is not theirs, on one asset's pages."""
    for partition in partitions:
        yield dg.AssetObservation(asset, partition=partition, metadata={"state": STOPPED, "reason": reason})


def failure(failed: Mapping[str, str], stopped: str, files: int) -> dg.Failure:
    """Every failed file with its reason, and what stopped the run as a whole, if anything did."""
    sentences = [f"{partition}: {reason}" for partition, reason in sorted(failed.items())]
    counted = [f"{len(failed)} of {files} files failed: {'; '.join(sentences)}"] if failed else []
    return dg.Failure(
        "; ".join([*([stopped] if stopped else []), *counted]),
        metadata={
            "failed files": table([{"partition": key, "reason": reason} for key, reason in sorted(failed.items())])
        }
        if failed
        else {},
        allow_retries=False,
    )
