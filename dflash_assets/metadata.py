"""Forms of metadata that several assets share."""

import base64

import dagster as dg

GROUP = "dflash"
"""One group: the whole lineage is one picture when the UI opens."""


def picture(png: bytes) -> dg.MarkdownMetadataValue:
    """A PNG that the UI shows in place."""
    return dg.MetadataValue.md(f"![picture](data:image/png;base64,{base64.b64encode(png).decode()})")


def file_uri(uri: str) -> dict[str, str]:
    """The entry under which the UI shows where an asset lies."""
    return {"dagster/uri": uri}
