"""Prompts become the source file of their partition; partitions without prompts are none the worse."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import dagster as dg
import pytest

from dflash_assets.completion_files import completion_file_assets
from dflash_assets.generated_completions import generated_completions
from dflash_assets.partitions import sync_partitions
from dflash_assets.resources import RecipeResource
from dflash_core.completions.completion import Message
from dflash_core.generation.prompt_file import Prompt
from dflash_core.recipe import Recipe, load_recipe
from dflash_core.storage.s3 import Store
from dflash_core.tokenization.encode import PromptEncoder
from dflash_core.workspace import Workspace, connect
from tests.chat_server import Behaviour, ChatServer, running

Run = Callable[..., dg.ExecuteInProcessResult]
Rows = Callable[..., bytes]
KEY = "sk-a-secret-that-nobody-may-see"


@pytest.fixture
def server(recipe: Recipe) -> Iterator[ChatServer]:
    """One that counts tokens as the demo target's tokenizer does, and wants a key."""
    encoder = PromptEncoder(recipe.tokenizer_path, recipe.tokenization)
    count = lambda text: len(encoder(Prompt(1, "", (Message("user", text),), (), "")))  # noqa: E731
    with running(Behaviour(count_tokens=count, key=KEY)) as started:
        yield started


@pytest.fixture
def generating(recipe_file: Path, bucket: str, server: ChatServer, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The recipe with a [generation] section."""
    monkeypatch.setenv("TEST_SERVER_KEY", KEY)
    section = f"""
[generation]
prompts = {{ bucket = "{bucket}", prefix = "prompts/" }}
servers = ["{server.url}"]
model = "tiny"
api_key_variable = "TEST_SERVER_KEY"
sampling = {{ max_tokens = 64 }}
attempts = 1
commit_every_s = 0.05
"""
    recipe_file.write_text(recipe_file.read_text() + section)
    return recipe_file


@pytest.fixture
def prompting(generating: Path) -> Workspace:
    """Of the recipe with a [generation] section."""
    return connect(load_recipe(generating))


@pytest.fixture
def run(instance: dg.DagsterInstance, recipe_file: Path, resources: dict[str, RecipeResource]) -> Run:
    """One run over one partition, or over a range as the backfill daemon launches it."""

    def start(assets: list[dg.AssetsDefinition], *partitions: str) -> dg.ExecuteInProcessResult:
        sync_partitions(instance, connect(load_recipe(recipe_file)))
        tags = {
            "dagster/asset_partition_range_start": partitions[0],
            "dagster/asset_partition_range_end": partitions[-1],
        }
        alone = len(partitions) == 1
        return dg.materialize(
            assets,
            instance=instance,
            resources=resources,
            partition_key=partitions[0] if alone else None,
            tags={} if alone else tags,
            raise_on_error=False,
        )

    return start


def put_prompts(workspace: Workspace, name: str, *texts: str) -> None:
    assert workspace.prompts is not None
    lines = [json.dumps({"id": f"{name}-{i}", "prompt": text}) for i, text in enumerate(texts)]
    workspace.prompts.put(f"{name}.jsonl", "\n".join(lines).encode())


def statuses(instance: dg.DagsterInstance, asset: str) -> dict[str, str]:
    keys = instance.get_dynamic_partitions("completion_files")
    found = instance.get_status_by_partition(dg.AssetKey(asset), keys, completion_file_assets.partitions_def) or {}
    return {key: status.value for key, status in found.items() if status is not None}


def test_a_key_without_prompts_is_materialized_without_its_upstream(
    instance: dg.DagsterInstance, source: Store, run: Run, rows: Rows
) -> None:
    """No [generation] in the recipe, as most have none: raw_completions alone, and the whole lineage alike."""
    for name in ("a", "b"):
        source.put(f"{name}.jsonl", rows(3, name))
    assert run([completion_file_assets], "a").success
    assert statuses(instance, "raw_completions") == {"a": "MATERIALIZED"}
    assert statuses(instance, "generated_completions") == {}
    assert run([generated_completions, completion_file_assets], "b").success
    assert statuses(instance, "raw_completions") == {"a": "MATERIALIZED", "b": "MATERIALIZED"}


def test_one_run_takes_a_partition_from_prompts_to_statistics(
    instance: dg.DagsterInstance, prompting: Workspace, run: Run, server: ChatServer
) -> None:
    put_prompts(prompting, "a", *(f"What is {i} plus {i}?" for i in range(5)))
    assert run([generated_completions, completion_file_assets], "a").success
    for asset in ("generated_completions", "raw_completions", "tokenized_shards", "loss_mask_stats"):
        assert statuses(instance, asset) == {"a": "MATERIALIZED"}, asset
    record = instance.fetch_materializations(
        dg.AssetRecordsFilter(asset_key=dg.AssetKey("generated_completions"), asset_partitions=["a"]), limit=1
    ).records[0]
    assert record.asset_materialization is not None
    metadata = record.asset_materialization.metadata
    assert metadata["prompts read"].value == metadata["dagster/row_count"].value == 5
    assert str(metadata["picture"].value).startswith("![picture](data:image/")


def test_a_range_ends_with_the_good_ones_green_and_the_bad_ones_named(
    instance: dg.DagsterInstance, prompting: Workspace, run: Run, rows: Rows
) -> None:
    put_prompts(prompting, "a", "One?", "Two?")
    put_prompts(prompting, "b", *(f"{i} [say:empty]" for i in range(4)))
    prompting.source.put("c.jsonl", rows(3, "c"))
    result = run([generated_completions], "a", "c")
    assert not result.success
    assert statuses(instance, "generated_completions") == {"a": "MATERIALIZED", "b": "FAILED", "c": "MATERIALIZED"}
    failure = result.failure_data_for_node("generated_completions")
    assert failure is not None
    assert failure.user_failure_data is not None
    assert "1 of 3 files failed: b: given up" in str(failure.user_failure_data.description)
    entry = failure.user_failure_data.metadata["failed files"]
    assert isinstance(entry, dg.TableMetadataValue)
    assert [record.data["partition"] for record in entry.records] == ["b"]
    page = dg.AssetRecordsFilter(dg.AssetKey("generated_completions"), asset_partitions=["b"])
    (record,) = instance.fetch_observations(page, limit=10).records
    assert record.asset_observation is not None
    assert "given up" in str(record.asset_observation.metadata["reason"].value)


def test_a_partition_alone_that_fails_is_told_alike(
    instance: dg.DagsterInstance, prompting: Workspace, run: Run
) -> None:
    put_prompts(prompting, "a", *(f"{i} [say:empty]" for i in range(4)))
    failure = run([generated_completions, completion_file_assets], "a").failure_data_for_node("generated_completions")
    assert failure is not None
    assert failure.user_failure_data is not None
    assert "failed files" in failure.user_failure_data.metadata
    assert statuses(instance, "generated_completions") == {"a": "FAILED"}


def test_the_key_is_nowhere(
    instance: dg.DagsterInstance, prompting: Workspace, run: Run, capfd: pytest.CaptureFixture[str]
) -> None:
    """Neither in events, logs nor S3; not even when the server repeats it in its refusal."""
    put_prompts(prompting, "a", "One?", "Two? [always:400]", "Three? [always:500]", "Four?")
    result = run([generated_completions], "a")
    assert result.success
    events = [str(record.event_log_entry) for record in instance.get_records_for_run(result.run_id).records]
    objects = [prompting.derived.get(key).body.decode() for key, _, _ in prompting.derived.list()]
    objects += [prompting.source.get("a.jsonl").body.decode()]
    assert len(objects) >= 3
    out = capfd.readouterr()
    for text in (*events, *objects, out.out, out.err):
        assert KEY not in text


@pytest.mark.parametrize("value", ["sk-another-secret", ""])
def test_a_wrong_key_is_told_without_it(
    prompting: Workspace, run: Run, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    """The server answers with the whole request, key included."""
    monkeypatch.setenv("TEST_SERVER_KEY", value)
    put_prompts(prompting, "a", "One?")
    failure = run([generated_completions], "a").failure_data_for_node("generated_completions")
    assert failure is not None
    assert failure.user_failure_data is not None
    sentence = str(failure.user_failure_data.description)
    assert ("refuses the key" in sentence) if value else ("TEST_SERVER_KEY" in sentence)
    assert not value or value not in str(failure)
