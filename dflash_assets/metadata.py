"""Forms of metadata that several assets share."""

import base64
from typing import Literal

import dagster as dg

GROUP = "dflash"
"""One group: the whole lineage is one picture when the UI opens."""


def picture(image: bytes, kind: Literal["png", "svg+xml"] = "png") -> dg.MarkdownMetadataValue:
    """A picture that the UI shows in place."""
    return dg.MetadataValue.md(f"![picture](data:image/{kind};base64,{base64.b64encode(image).decode()})")


def file_uri(uri: str) -> dict[str, str]:
    """The entry under which the UI shows where an asset lies."""
    return {"dagster/uri": uri}
