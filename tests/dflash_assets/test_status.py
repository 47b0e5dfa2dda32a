"""`dflash status` says how things stand, from the instance alone."""

import io
from collections import Counter
from collections.abc import Callable, Sequence

import dagster as dg
from rich.console import Console

from dflash_assets.quarantine import note_try
from dflash_assets.status import read_status, render
from dflash_core.records import SourceFile
from dflash_core.storage.s3 import Store
from dflash_core.workspace import Workspace

Materialize = Callable[[Sequence[str]], dg.ExecuteInProcessResult]
Sync = Callable[[], tuple[SourceFile, ...]]
Rows = Callable[..., bytes]


def test_states_reasons_quarantine_and_runs(
    instance: dg.DagsterInstance, workspace: Workspace, source: Store, materialize: Materialize, sync: Sync, rows: Rows
) -> None:
    for name in ("a", "b", "later"):
        source.put(f"{name}.jsonl", rows(4, name))
    source.put("[bold]bad.jsonl", b"not json\n")
    etags = {file.partition: file.etag for file in sync()}
    bad = next(key for key in etags if "bad" in key)
    materialize([bad, "a", "b"])
    once = read_status(instance, workspace)
    assert Counter(once.partitions.filter(asset="loss_mask_stats")["state"]) == {
        "materialized": 2,
        "failed": 1,
        "missing": 1,
    }
    (failed,) = once.failed
    assert (failed.partition, failed.tries, failed.quarantined) == (bad, 1, False)
    for _ in range(2):
        note_try(instance, read_status(instance, workspace).failed[0], etags[bad])
    source.client.delete_object(Bucket=source.bucket, Key=source.prefix + "later.jsonl")

    console = Console(width=250, file=io.StringIO())
    console.print(render(read_status(instance, workspace)))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    for part in (
        bad,
        "quarantined",
        "invalid JSON",
        "1 partitions without a file: later",
        "failure",
        "1 of 3 files failed",
    ):
        assert part in shown
