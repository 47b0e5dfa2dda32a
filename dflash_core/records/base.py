"""What every stored record is made of."""

from pydantic import BaseModel, ConfigDict


class Record(BaseModel):
    """Base of everything written to S3 as JSON. Unknown fields are refused: a newer manifest is not half-read."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class StoredObject(Record):
    """One object below the storage prefix, as a manifest names it. Readers verify size and sha256."""

    key: str
    """Relative to the storage prefix."""
    size: int
    sha256: str


class CommandFailure(Record):
    """What a core command writes instead of its result when it refuses."""

    error: str
