"""What every stored record is made of."""

from collections.abc import Callable

from pydantic import BaseModel, ConfigDict

OnProgress = Callable[[int, int], None]
"""Told (done, total) while something long goes on."""


class Record(BaseModel):
    """Base of everything written to S3 as JSON. Unknown fields are refused: a newer manifest is never half-read."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class StoredObject(Record):
    """One object below the storage prefix, as a manifest names it. Readers verify size and sha256."""

    key: str
    """Relative to the storage prefix."""
    size: int
    sha256: str
    etag: str | None = None
    """What the store called these bytes when they were written: a listing shows whether they are still the same.
    None: not known, written before it was kept or in several parts."""
