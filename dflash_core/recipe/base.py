"""What every table of the recipe is made of."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Share = Annotated[float, Field(ge=0.0, le=1.0)]
Positive = Annotated[int, Field(gt=0)]
Cron = Annotated[str, Field(pattern=r"^\S+( \S+){4}$")]
TemplateOption = bool | int | float | str


class Section(BaseModel):
    """A table of the recipe: frozen, and a misspelt key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)
