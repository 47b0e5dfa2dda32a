"""S3Resource says how the stores are reached, in this process and in its workers, and no environment is changed."""

import os
from collections.abc import Callable
from pathlib import Path

import dagster as dg
import pytest
from dagster_aws.s3 import S3Resource

from dflash_assets.completion_files import completion_file_assets
from dflash_assets.resources import RecipeResource, s3_of_environment
from dflash_core.recipe import load_recipe
from dflash_core.records import SourceFile
from dflash_core.storage.s3 import NOTHING_SAID, Access, Store
from tests.dflash_assets.conftest import explicit

Rows = Callable[[int, str], bytes]


def test_a_run_reaches_the_store_that_s3_names(
    source: Store,
    sync: Callable[[], tuple[SourceFile, ...]],
    rows: Rows,
    recipe_file: Path,
    instance: dg.DagsterInstance,
    access: Access,
    request: pytest.FixtureRequest,
) -> None:
    recipe_file.write_text(recipe_file.read_text().replace("workers = 1", "workers = 2"))
    for name in ("a", "b"):
        source.put(f"{name}.jsonl", rows(4, name))
    sync()
    request.getfixturevalue("nothing_set")
    for resource, succeeds in ((S3Resource(), False), (explicit(access), True)):
        done = dg.materialize(
            [completion_file_assets],
            instance=instance,
            resources={"recipe": RecipeResource(path=str(recipe_file), s3=resource)},
            tags={"dagster/asset_partition_range_start": "a", "dagster/asset_partition_range_end": "b"},
            raise_on_error=False,
        )
        assert done.success is succeeds


def test_the_client_stays_cores_own(recipe_file: Path, access: Access, nothing_set: None) -> None:
    workspace = RecipeResource(path=str(recipe_file), s3=explicit(access)).open()
    client, storage = workspace.source.client, workspace.recipe.storage
    assert client.meta.endpoint_url == access.endpoint_url
    assert client.meta.config.max_pool_connections == storage.downloads + storage.uploads


def test_what_the_recipe_names_has_precedence(recipe_file: Path, access: Access, nothing_set: None) -> None:
    recipe_file.write_text(recipe_file.read_text().replace("[target]", 'endpoint_url = "http://recipe.test"\n[target]'))
    workspace = RecipeResource(path=str(recipe_file), s3=explicit(access)).open()
    assert workspace.source.client.meta.endpoint_url == "http://recipe.test"


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
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-central-1")
    opened = RecipeResource(path=str(recipe_file), s3=S3Resource()).open()
    assert opened.access == NOTHING_SAID
    assert opened.source.client.meta.region_name == "eu-central-1", "what boto3 finds by itself"
    assert load_recipe(recipe_file).storage.region is None


def test_opening_changes_no_environment(recipe_file: Path, access: Access, nothing_set: None) -> None:
    before = dict(os.environ)
    for resource in (S3Resource(), explicit(access)):
        workspace = RecipeResource(path=str(recipe_file), s3=resource).open()
        assert dict(os.environ) == before
    assert list(workspace.source.list()) == [], "and reaches the store all the same"
    assert dict(os.environ) == before
