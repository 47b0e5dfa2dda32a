"""S3Resource says how the stores are reached: for this process, its workers, and the commands it starts."""

from collections.abc import Callable
from pathlib import Path

import dagster as dg
import pytest
from dagster_aws.s3 import S3Resource

from dflash_assets.completion_files import completion_file_assets
from dflash_assets.resources import RecipeResource, s3_of_environment
from dflash_core.recipe import load_recipe
from dflash_core.records import SourceFile
from dflash_core.storage.embedded import Endpoint
from dflash_core.storage.store import Store, open_stores

Rows = Callable[[int, str], bytes]


@pytest.fixture
def nothing_set(monkeypatch: pytest.MonkeyPatch, endpoint: Endpoint) -> None:
    """A process without any AWS variable; what the code under test sets is undone."""
    for name in (*endpoint.environment(), "AWS_ENDPOINT_URL_S3", "AWS_PROFILE", "AWS_SESSION_TOKEN"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


def access(endpoint: Endpoint) -> S3Resource:
    return S3Resource(
        endpoint_url=endpoint.url,
        region_name="us-east-1",
        aws_access_key_id=endpoint.access_key,
        aws_secret_access_key=endpoint.secret_key,
    )


def test_a_run_reaches_the_store_that_s3_names(
    source: Store,
    sync: Callable[[], tuple[SourceFile, ...]],
    rows: Rows,
    recipe_file: Path,
    instance: dg.DagsterInstance,
    endpoint: Endpoint,
    request: pytest.FixtureRequest,
) -> None:
    recipe_file.write_text(recipe_file.read_text().replace("workers = 1", "workers = 2"))
    for name in ("a", "b"):
        source.put(f"{name}.jsonl", rows(4, name))
    sync()
    request.getfixturevalue("nothing_set")
    for resource, succeeds in ((S3Resource(), False), (access(endpoint), True)):
        done = dg.materialize(
            [completion_file_assets],
            instance=instance,
            resources={"recipe": RecipeResource(path=str(recipe_file), s3=resource)},
            tags={"dagster/asset_partition_range_start": "a", "dagster/asset_partition_range_end": "b"},
            raise_on_error=False,
        )
        assert done.success is succeeds


def test_the_client_stays_cores_own(recipe_file: Path, endpoint: Endpoint, nothing_set: None) -> None:
    recipe = RecipeResource(path=str(recipe_file), s3=access(endpoint)).load()
    client = open_stores(recipe).source.client
    assert client.meta.endpoint_url == endpoint.url
    assert client.meta.config.max_pool_connections == recipe.storage.downloads + recipe.storage.uploads


def test_what_the_recipe_names_has_precedence(recipe_file: Path, endpoint: Endpoint, nothing_set: None) -> None:
    recipe_file.write_text(recipe_file.read_text().replace("[target]", 'endpoint_url = "http://recipe.test"\n[target]'))
    recipe = RecipeResource(path=str(recipe_file), s3=access(endpoint)).load()
    assert open_stores(recipe).source.client.meta.endpoint_url == "http://recipe.test"


def test_the_environment_is_what_the_ui_shows(monkeypatch: pytest.MonkeyPatch, nothing_set: None) -> None:
    assert s3_of_environment() == S3Resource()
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://store.test")
    monkeypatch.setenv("AWS_REGION", "eu-central-1")
    monkeypatch.setenv("AWS_PROFILE", "drafter")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not to be shown")
    shown = s3_of_environment()
    assert (shown.endpoint_url, shown.region_name, shown.profile_name) == (
        "http://store.test",
        "eu-central-1",
        "drafter",
    )
    assert "not to be shown" not in repr(shown)


def test_the_unset_resource_changes_nothing(recipe_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_REGION", "eu-central-1")
    RecipeResource(path=str(recipe_file), s3=S3Resource()).load()
    assert load_recipe(recipe_file).storage.region is None
