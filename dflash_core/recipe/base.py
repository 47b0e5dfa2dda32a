"""What every table of the recipe is made of, and how a setting says what it decides.

A setting decides everything (see `Use`) unless it, or its table, says otherwise. So a new setting that nobody thought
about makes shards, runs and reports again, which costs time; the other way round it would leave old ones in use, which
nobody would notice.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import to_jsonable_python

Share = Annotated[float, Field(ge=0.0, le=1.0)]
Positive = Annotated[int, Field(gt=0)]
Cron = Annotated[str, Field(pattern=r"^\S+( \S+){4}$")]
TemplateOption = bool | int | float | str

Use = Literal["rows", "weights", "acceptance", "answers", "kept answers"]
"""What settings can decide: the token ids and masks of rows; the weights of a drafter; what an evaluation measures;
what a server answers; which of its answers are kept."""
EVERYTHING: tuple[Use, ...] = ("rows", "weights", "acceptance", "answers", "kept answers")


@dataclass(frozen=True)
class Decides:
    """Stands next to a field, as `Annotated[int, Decides("weights")]`: the field decides these uses and no others."""

    uses: tuple[Use, ...]

    def __init__(self, *uses: Use) -> None:
        object.__setattr__(self, "uses", uses)


DecidesNothing = Decides()
"""How something is done, where it is or who is told: the results are the same."""


class Section(BaseModel):
    """A table of the recipe: frozen, and a misspelt key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    decides: ClassVar[tuple[Use, ...]] = EVERYTHING
    """What the fields of this table decide, those with a `Decides` next to them excepted."""


def settings_for(section: Section, use: Use, prefix: str = "") -> dict[str, Any]:
    """Every setting that decides `use`, by its full name ("tokenization.max_length"), as JSON has it.

    A setting that is not set (None) is left out: a new optional one changes nothing until somebody sets it.
    """
    found: dict[str, Any] = {}
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        mark = next((entry for entry in field.metadata if isinstance(entry, Decides)), None)
        if isinstance(value, Section):
            if mark is None or use in mark.uses:
                found |= settings_for(value, use, f"{prefix}{name}.")
        elif value is not None and use in (section.decides if mark is None else mark.uses):
            found[f"{prefix}{name}"] = to_jsonable_python(value)
    return found


def settings_hash(settings: Mapping[str, Any], given: Mapping[str, str]) -> str:
    """sha256 of settings and of what else decides (hashes of files, code versions), by name; 64 hexadecimal digits."""
    content = json.dumps({"settings": dict(settings), "given": dict(given)}, sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()
