"""The recipe: one TOML file describes one complete run, validated here once and trusted everywhere else.

Unknown keys are refused, paths are resolved against the working directory, and every field has its unit in its name or
its docstring. Nothing below this module reads the environment (boto3 itself reads the standard AWS variables).
"""

import tomllib
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError, model_validator

from dflash_core.errors import RecipeError
from dflash_core.recipe.base import Decides, DecidesNothing, Section, TemplateOption, Use, settings_for, settings_hash
from dflash_core.recipe.data import (
    GateSettings,
    GenerationSettings,
    OutcomeSettings,
    SamplingSettings,
    SourceSettings,
    StorageSettings,
    TargetSettings,
    TokenizationSettings,
    TrainingSetSettings,
)
from dflash_core.recipe.drafter import (
    DrafterSettings,
    EvaluationSettings,
    ExportSettings,
    PlacementSettings,
    TrainingSettings,
)
from dflash_core.recipe.operations import AlertSettings, AutomationSettings

__all__ = [
    "AlertSettings",
    "AutomationSettings",
    "DrafterSettings",
    "EvaluationSettings",
    "ExportSettings",
    "GateSettings",
    "GenerationSettings",
    "OutcomeSettings",
    "PlacementSettings",
    "Recipe",
    "SamplingSettings",
    "SourceSettings",
    "StorageSettings",
    "TargetSettings",
    "TemplateOption",
    "TokenizationSettings",
    "TrainingSetSettings",
    "TrainingSettings",
    "Use",
    "load_recipe",
    "settings_hash",
]


class Recipe(Section):
    """One complete run."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]*$"), DecidesNothing]
    seed: Annotated[int, Decides("weights", "acceptance", "answers")] = 0
    source: SourceSettings
    storage: StorageSettings
    target: TargetSettings
    tokenization: TokenizationSettings = TokenizationSettings()
    training_set: TrainingSetSettings = TrainingSetSettings()
    gate: GateSettings = GateSettings()
    drafter: DrafterSettings = DrafterSettings()
    training: TrainingSettings = TrainingSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    export: ExportSettings = ExportSettings()
    automation: AutomationSettings = AutomationSettings()
    alerts: AlertSettings = AlertSettings()
    generation: GenerationSettings | None = None

    @model_validator(mode="after")
    def _prompts_apart(self) -> "Recipe":
        if self.generation is not None and self.generation.prompts.bucket == self.source.bucket:
            first, second = sorted((self.generation.prompts.prefix, self.source.prefix))
            if second.startswith(first):
                raise ValueError(
                    f"generation.prompts ({first!r}) and source ({second!r}) must not be inside one another"
                )
        return self

    @model_validator(mode="after")
    def _derived_apart(self) -> "Recipe":
        read: dict[str, SourceSettings] = {"source": self.source}
        if self.generation is not None:
            read["generation.prompts"] = self.generation.prompts
        for name, place in read.items():
            if place.bucket == self.storage.bucket and self.storage.prefix.startswith(place.prefix):
                raise ValueError(
                    f"storage ({self.storage.prefix!r}) must not be inside {name} ({place.prefix!r}) in the same "
                    "bucket, or what is derived would be read as new input; give them prefixes of their own"
                )
        return self

    def without_secrets(self) -> bytes:
        """JSON of what decides the results; not who is told, and no addresses of servers, which may hold a password."""
        return self.model_dump_json(indent=1, exclude={"alerts": True, "generation": {"servers"}}).encode()

    def settings_for(self, use: Use) -> dict[str, Any]:
        """Every setting that decides `use` by its full name; where one table leaves it to another, what then holds."""
        left_open: dict[Use, dict[str, Any]] = {
            "rows": {"tokenization.min_supervised_tokens": self.min_supervised_tokens},
            "weights": {"training.gamma": self.gamma, "training.step_rows": self.step_rows},
        }
        return settings_for(self, use) | left_open.get(use, {})

    @property
    def tokenizer_path(self) -> Path:
        """The folder of the tokenizer that renders the completions."""
        return self.tokenization.tokenizer or self.target.path

    @property
    def min_supervised_tokens(self) -> int:
        """Fewest supervised tokens a row may have to be kept."""
        return self.tokenization.min_supervised_tokens or 2 * self.drafter.block_size

    @property
    def step_rows(self) -> int:
        """Rows of an optimizer step over all drafters: how they are shared out does not change the weights."""
        training = self.training
        return training.batch_rows * training.accumulation * len(training.placement.drafters)

    @property
    def gamma(self) -> float:
        """Decay constant of the slot weights (section 3 of the paper: 7, 5, 4 for block sizes 16, 10, 8)."""
        if self.training.gamma is not None:
            return self.training.gamma
        return 7.0 if self.drafter.block_size >= 16 else 5.0 if self.drafter.block_size >= 10 else 4.0


def load_recipe(path: Path) -> Recipe:
    """Read and validate a recipe.

    Raises:
        RecipeError: the file is missing, is not TOML, has an unknown or ill-typed key; the message names file and key.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf8"))
    except FileNotFoundError:
        raise RecipeError(
            f"recipe {path} does not exist; give an existing TOML file, for example recipes/demo.toml"
        ) from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise RecipeError(f"recipe {path} cannot be read: {error}") from None
    try:
        return Recipe.model_validate(table)
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(str(p) for p in e['loc']) or 'recipe'}: "
            + ("no such key; check its spelling" if e["type"] == "extra_forbidden" else e["msg"])
            for e in error.errors()
        )
        raise RecipeError(f"recipe {path}: {problems}") from None
