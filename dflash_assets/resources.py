"""What assets are given: the recipe of this code location, opened with the access to S3 that the code location has."""

import os
from pathlib import Path

import dagster as dg
from dagster_aws.s3 import S3Resource

from dflash_core.errors import UserError
from dflash_core.recipe import load_recipe
from dflash_core.storage.s3 import Access
from dflash_core.workspace import Workspace, connect


class RecipeResource(dg.ConfigurableResource):  # type: ignore[type-arg]
    """One recipe file, validated and opened when an asset asks for it."""

    path: str
    s3: S3Resource

    def open(self) -> Workspace:
        """The recipe and its stores, reached as `s3` says; what the recipe says itself has precedence.

        Raises:
            dg.Failure: they cannot be used; the sentence says why.
        """
        try:
            return connect(load_recipe(Path(self.path)), _access(self.s3))
        except UserError as error:
            raise dg.Failure(str(error), allow_retries=False) from None


def s3_of_environment() -> S3Resource:
    """The access that the standard AWS variables describe, credentials left to boto3, so that the UI shows it."""
    return S3Resource(
        endpoint_url=os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL"),
        region_name=os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION"),
        profile_name=os.environ.get("AWS_PROFILE"),
    )


def _access(s3: S3Resource) -> Access:
    return Access(
        endpoint_url=s3.endpoint_url,
        region=s3.region_name,
        profile=s3.profile_name,
        access_key=s3.aws_access_key_id,
        secret_key=s3.aws_secret_access_key,
        session_token=s3.aws_session_token,
    )
