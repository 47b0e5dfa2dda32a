"""A small world for the asset layer: real store, real tokenizer (the demo target's), an instance of its own."""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import dagster as dg
import pytest
from dagster._core.definitions.data_version import CachingStaleStatusResolver
from dagster._core.loader import LoadingContextForTest
from dagster_aws.s3 import S3Resource

from dflash_assets.completion_files import completion_file_assets
from dflash_assets.definitions import defs
from dflash_assets.partitions import sync_partitions
from dflash_assets.resources import RecipeResource
from dflash_core.recipe import Recipe, load_recipe
from dflash_core.records import SourceFile
from dflash_core.storage.s3 import Access, Store
from dflash_core.workspace import Workspace, connect

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture
def rows() -> Callable[..., bytes]:
    """A file of completions of which no two are alike."""

    def make(
        count: int,
        name: str,
        reasoning: str = "Basket {number} of {name} has {number} apples, and I count them again.",
        answer: str = "The answer is {number}, since {number} apples were counted twice.",
    ) -> bytes:
        lines = [
            {
                "id": f"{name}-{number}",
                "messages": [
                    {"role": "user", "content": f"How many apples are in basket {number} of {name}?"},
                    {
                        "role": "assistant",
                        "reasoning_content": " ".join([reasoning.format(number=number, name=name)] * (1 + number % 7)),
                        "content": answer.format(number=number, name=name),
                    },
                ],
                "finish_reason": "stop",
            }
            for number in range(count)
        ]
        return "".join(json.dumps(line) + "\n" for line in lines).encode()

    return make


@pytest.fixture
def recipe_file(bucket: str, tmp_path: Path) -> Path:
    """A recipe on a fresh bucket with the demo target's tokenizer."""
    path = tmp_path / "recipe.toml"
    path.write_text(
        f"""
name = "test"
[source]
bucket = "{bucket}"
prefix = "completions/"
[storage]
bucket = "{bucket}"
prefix = "derived/"
work_dir = "{tmp_path}/work"
[target]
path = "{REPOSITORY}/demo/target"
layers = 2
[tokenization]
workers = 1
[drafter]
block_size = 4
"""
    )
    return path


def require_supervised_tokens(recipe_file: Path, count: int) -> None:
    """Rows with fewer are dropped; a bare "7" behind an empty thought has 8."""
    rule = f"[tokenization]\nmin_supervised_tokens = {count}"
    recipe_file.write_text(recipe_file.read_text().replace("[tokenization]", rule))


@pytest.fixture
def recipe(recipe_file: Path) -> Recipe:
    return load_recipe(recipe_file)


@pytest.fixture
def workspace(recipe: Recipe) -> Workspace:
    return connect(recipe)


@pytest.fixture
def source(workspace: Workspace) -> Store:
    """Where the completions are."""
    return workspace.source


@pytest.fixture
def resources(recipe_file: Path) -> dict[str, RecipeResource]:
    """What assets are given."""
    return {"recipe": RecipeResource(path=str(recipe_file), s3=S3Resource())}


@pytest.fixture
def nothing_set(monkeypatch: pytest.MonkeyPatch, access: Access) -> None:
    """A process without any AWS variable."""
    for name in (*access.environment(), "AWS_ENDPOINT_URL_S3", "AWS_PROFILE", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


def explicit(access: Access) -> S3Resource:
    """The resource that says everything itself."""
    return S3Resource(
        endpoint_url=access.endpoint_url,
        region_name=access.region,
        aws_access_key_id=access.access_key,
        aws_secret_access_key=access.secret_key,
    )


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    with dg.instance_for_test() as made:
        yield made


@pytest.fixture
def materialize(
    instance: dg.DagsterInstance, resources: dict[str, RecipeResource]
) -> Callable[..., dg.ExecuteInProcessResult]:
    """Materialize file assets, all three if none is named, over a range of partitions, as the daemon launches it."""

    def run(partitions: Sequence[str], assets: Sequence[str] | None = None) -> dg.ExecuteInProcessResult:
        return dg.materialize(
            [completion_file_assets],
            selection=assets,
            instance=instance,
            resources=resources,
            tags={
                "dagster/asset_partition_range_start": partitions[0],
                "dagster/asset_partition_range_end": partitions[-1],
            },
            raise_on_error=False,
        )

    return run


@pytest.fixture
def sync(instance: dg.DagsterInstance, workspace: Workspace) -> Callable[[], tuple[SourceFile, ...]]:
    """Make what is in the bucket partitions."""
    return lambda: sync_partitions(instance, workspace).sources


@pytest.fixture
def stale(instance: dg.DagsterInstance) -> Callable[[str, str | None], list[str]]:
    """Why the UI calls an asset's partition unsynced; nothing: it is as new as what it was made from."""

    def causes(asset: str, partition: str | None = None) -> list[str]:
        loading = LoadingContextForTest(instance)
        resolver = CachingStaleStatusResolver(instance, defs.resolve_asset_graph(), loading)
        return [cause.reason for cause in resolver.get_stale_causes(dg.AssetKey(asset), partition)]

    return causes
