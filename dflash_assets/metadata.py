"""Forms of metadata that several assets share."""

import base64
from collections.abc import Mapping, Sequence
from typing import Literal

import dagster as dg

from dflash_core.records import ShardManifest, TrainingSet

GROUP = "dflash"
"""One group: the whole lineage is one picture when the UI opens."""
SHOWN = 20
"""Lines of a list."""
_TYPES = {int: "int", float: "float"}


def picture(image: bytes, kind: Literal["png", "svg+xml"] = "png") -> dg.MarkdownMetadataValue:
    """A picture that the UI shows in place."""
    return dg.MetadataValue.md(f"![picture](data:image/{kind};base64,{base64.b64encode(image).decode()})")


def file_uri(uri: str) -> dict[str, str]:
    """The entry under which the UI shows where an asset is."""
    return {"dagster/uri": uri}


def version_tags(
    version: str, code_version: str, made_from: Mapping[dg.AssetKey, str], last_event: int | None = None
) -> dict[str, str]:
    """What lets Dagster tell whether an asset is stale; the events of a generator carry none of it by themselves.

    Args:
        version: of the data.
        code_version: of the code that made it.
        made_from: upstream asset -> the version of its data that was used.
        last_event: storage id of the newest event; an upstream partition that gets another version after it makes this
            one stale. None: the upstream has no partitions, its version is enough.
    """
    tags = {"dagster/data_version": version, "dagster/code_version": code_version}
    for key, used in made_from.items():
        tags[f"dagster/input_data_version/{key.to_user_string()}"] = used
        tags[f"dagster/input_event_pointer/{key.to_user_string()}"] = "NULL" if last_event is None else str(last_event)
    return tags


def lost_rows(record: ShardManifest | TrainingSet) -> dict[str, int | dg.JsonMetadataValue]:
    """Rows read, and those that were dropped or rejected, each with their reasons.

    Objects from before TOKENIZATION_VERSION 4 count both as rejected.
    """
    dropped: dict[str, int | dg.JsonMetadataValue] = {}
    if record.rows_dropped is not None:
        reasons = dg.MetadataValue.json(record.drop_reasons or {})
        dropped = {"rows dropped": record.rows_dropped, "drop reasons": reasons}
    return {
        "rows read": record.rows_read,
        **dropped,
        "rows rejected": record.rows_rejected,
        "reject reasons": dg.MetadataValue.json(record.reject_reasons),
    }


def bullets(lines: Sequence[str]) -> dg.MarkdownMetadataValue:
    """The first lines as a list, and how many more there are."""
    more = [f"- and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
    return dg.MetadataValue.md("\n".join([f"- {line}" for line in lines[:SHOWN]] + more) or "none")


def table(rows: Sequence[Mapping[str, str | int | float]]) -> dg.TableMetadataValue:
    """Rows with equal columns."""
    columns = (
        [dg.TableColumn(name, _TYPES.get(type(value), "string")) for name, value in rows[0].items()] if rows else []
    )
    return dg.MetadataValue.table([dg.TableRecord(dict(row)) for row in rows], dg.TableSchema(columns))
