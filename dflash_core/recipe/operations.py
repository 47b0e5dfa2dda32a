"""What runs by itself and who is told."""

from typing import ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, field_validator

from dflash_core.recipe.base import Cron, Positive, Section, Use


class AutomationSettings(Section):
    """What Dagster does by itself once its schedules and sensors are switched on."""

    decides: ClassVar[tuple[Use, ...]] = ()
    rerun_cron: Cron = "*/15 * * * *"
    """When failed files are tried again."""
    nightly_cron: Cron = "0 2 * * *"
    """When the whole lineage is brought up to date."""
    timezone: str = "UTC"
    max_attempts: Positive = 3
    """Tries of one version of a file, the first included; after them it is quarantined until released or replaced."""


class AlertSettings(Section):
    """Who is told of a failed run, at once."""

    decides: ClassVar[tuple[Use, ...]] = ()
    webhook_url: SecretStr | None = None
    """A POST with JSON goes there; None: nobody is told. Never logged."""
    format: Literal["json", "slack"] = "json"
    ui_url: str | None = None
    """Where people reach the Dagster UI, for the link in the message."""
    timeout_s: float = Field(10.0, gt=0)

    @field_validator("webhook_url")
    @classmethod
    def _is_http(cls, url: SecretStr | None) -> SecretStr | None:
        if url is not None:
            parts = urlsplit(url.get_secret_value())
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise ValueError("must be an http(s) address")
        return url
