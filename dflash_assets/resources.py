"""What assets are given: the recipe of this code location, and the access to S3 that it is used with."""

import os
from pathlib import Path

import dagster as dg
from dagster_aws.s3 import S3Resource

from dflash_core.errors import UserError
from dflash_core.recipe import Recipe, load_recipe


class RecipeResource(dg.ConfigurableResource):  # type: ignore[type-arg]
    """One recipe file, validated when an asset asks for it."""

    path: str
    s3: S3Resource

    def load(self) -> Recipe:
        """The recipe; from then on the AWS variables of this process say what `s3` says.

        Core opens its stores itself, with pools and time-outs, in this process, in its workers and in the trainer; the
        standard variables are the one way that reaches all of them. What the recipe names itself has precedence.

        Raises:
            dg.Failure: it cannot be used; the sentence says why.
        """
        os.environ.update(_variables(self.s3))
        try:
            return load_recipe(Path(self.path))
        except UserError as error:
            raise dg.Failure(str(error), allow_retries=False) from None


def s3_of_environment() -> S3Resource:
    """The access that the standard AWS variables describe, credentials left to boto3, so that the UI shows it."""
    return S3Resource(
        endpoint_url=os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL"),
        region_name=os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION"),
        profile_name=os.environ.get("AWS_PROFILE"),
    )


def _variables(s3: S3Resource) -> dict[str, str]:
    named = {
        "AWS_ENDPOINT_URL_S3": s3.endpoint_url,
        "AWS_REGION": s3.region_name,
        "AWS_DEFAULT_REGION": s3.region_name,
        "AWS_PROFILE": s3.profile_name,
        "AWS_ACCESS_KEY_ID": s3.aws_access_key_id,
        "AWS_SECRET_ACCESS_KEY": s3.aws_secret_access_key,
        "AWS_SESSION_TOKEN": s3.aws_session_token,
    }
    return {name: value for name, value in named.items() if value is not None}
