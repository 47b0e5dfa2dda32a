"""Forms of metadata that several assets share."""

import base64
from collections.abc import Mapping, Sequence
from typing import Literal

import dagster as dg

GROUP = "dflash"
"""One group: the whole lineage is one picture when the UI opens."""
SHOWN = 20
"""Lines of a list."""
_TYPES = {int: "int", float: "float"}


def picture(image: bytes, kind: Literal["png", "svg+xml"] = "png") -> dg.MarkdownMetadataValue:
    """A picture that the UI shows in place."""
    return dg.MetadataValue.md(f"![picture](data:image/{kind};base64,{base64.b64encode(image).decode()})")


def file_uri(uri: str) -> dict[str, str]:
    """The entry under which the UI shows where an asset lies."""
    return {"dagster/uri": uri}


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
