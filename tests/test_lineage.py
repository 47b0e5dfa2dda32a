"""The chain behind a drafter, down to file and line; and the drafters that learned from a file."""

import json
from pathlib import Path

import pytest
from rich.console import Console

from dflash_core.errors import UserError
from dflash_core.lineage import drafters_of, lineage_report, require_file, trace_drafter, trace_rows
from dflash_core.quality.training_set import freeze_training_set
from dflash_core.recipe import Recipe
from dflash_core.records import DrafterCheckpoint, FileCoverage, RunPointer, StoredObject, TrainingSet
from dflash_core.storage.store import Stores, list_sources, open_stores
from dflash_core.tokenization.fingerprint import fingerprint
from dflash_core.tokenization.pipeline import process_files

REPOSITORY = Path(__file__).resolve().parent.parent
NOWHERE = StoredObject(key="weights.safetensors", size=1, sha256="a" * 64)


def completions(name: str, count: int) -> bytes:
    rows = [
        {
            "id": f"{name}-{number}",
            "messages": [
                {"role": "user", "content": f"How many figs are in {number} {name}?"},
                {"role": "assistant", "content": f"There are {number} {name} with figs. " * (3 + number % 4)},
            ],
            "finish_reason": "stop",
        }
        for number in range(count)
    ]
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


@pytest.fixture
def recipe(bucket: str, tmp_path: Path) -> Recipe:
    return Recipe.model_validate(
        {
            "name": "traced",
            "source": {"bucket": bucket, "prefix": "in/"},
            "storage": {"bucket": bucket, "prefix": "out/", "work_dir": tmp_path},
            "target": {"path": REPOSITORY / "demo/target", "layers": 2},
            "tokenization": {"workers": 1, "min_supervised_tokens": 8},
            "drafter": {"block_size": 4},
        }
    )


@pytest.fixture
def stores(recipe: Recipe) -> Stores:
    return open_stores(recipe)


@pytest.fixture
def frozen(recipe: Recipe, stores: Stores) -> TrainingSet:
    """Three files, the first with a line that is no row."""
    stores.source.put("a [1].jsonl", completions("a", 3) + b"broken\n" + completions("b", 2))
    stores.source.put("c.jsonl", completions("c", 4))
    stores.source.put("d.jsonl", completions("d", 4))
    list(process_files(recipe, list_sources(stores.source)))
    return freeze_training_set(recipe, fingerprint(recipe))


def finish(stores: Stores, frozen: TrainingSet, run: str, prefixes: dict[str, float]) -> None:
    """A finished training, as its manifest says."""
    coverage = tuple(
        FileCoverage(partition=p, rows=9, tokens=99, blocks=7, mean_loss=0.5, joint_accepted_prefix=prefix)
        for p, prefix in prefixes.items()
    )
    checkpoint = DrafterCheckpoint(
        run=run,
        recipe=frozen.recipe,
        code_version="7",
        training_set=frozen.hash,
        gate="passed",
        target_fingerprint="target-1",
        tokenizer_sha256="t" * 64,
        steps=10,
        train_s=1.0,
        final_loss=0.5,
        held_out_accepted_prefix=2.0,
        weights=NOWHERE,
        config=NOWHERE,
        metrics=NOWHERE,
        coverage=coverage,
        settings=StoredObject(key=f"drafter_checkpoint/{run}/recipe.json", size=1, sha256="b" * 64),
        skipped_steps=0,
        skipped_rows=0,
    )
    stores.derived.put_record(f"drafter_checkpoint/{run}/manifest.json", checkpoint)
    stores.derived.put_record("drafter_checkpoint/latest.json", RunPointer(run=run))


def text(recipe: Recipe, run: str | None, partition: str | None, shown: int = 20) -> str:
    console = Console(width=400, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(lineage_report(recipe, run, partition, shown))
    return console.export_text()


def test_the_chain_goes_down_to_file_and_line(recipe: Recipe, stores: Stores, frozen: TrainingSet) -> None:
    hostile = frozen.shards[0].partition
    finish(stores, frozen, "traced-1", {hostile: 3.0, "c": 1.5})
    stores.source.put("c.jsonl", completions("changed", 4))
    stores.source.client.delete_object(Bucket=stores.source.bucket, Key="in/d.jsonl")

    lineage = trace_drafter(recipe)
    assert [file.shard.partition for file in lineage.files] == ["c", hostile, "d"], "the worst learned first"
    assert [file.now for file in lineage.files] == ["changed since", "unchanged", "vanished since"]
    assert require_file(lineage, hostile).rejected == 1
    rows = trace_rows(recipe, require_file(lineage, hostile).shard)
    assert [row.line for row in rows] == [1, 2, 3, 5, 6], "line 4 is no row"

    shown = text(recipe, None, None)
    for part in (
        frozen.hash,
        frozen.fingerprint,
        "training code 7",
        "drafter_checkpoint/traced-1/recipe.json  sha256 bbbbbbbbbbbb",
        "target target-1",
        "a [1].jsonl",
        "1 lines rejected",
    ):
        assert part in shown
    assert frozen.shards[0].source_etag[:12] in shown
    assert "and 2 more files" in text(recipe, "traced-1", None, 1)
    lines = text(recipe, "traced-1", hostile)
    assert lines == text(recipe, "traced-1", "a [1].jsonl") == text(recipe, "traced-1", "a [1]"), "a path"
    assert f"{frozen.shards[0].source_uri}:5  b-0" in lines
    with pytest.raises(UserError, match="traced-1 was not trained on e; it was on 3 files"):
        text(recipe, "traced-1", "e")
    with pytest.raises(UserError, match="no finished run 'none'"):
        text(recipe, "none", None)


def test_an_emptied_source_leaves_the_chain(recipe: Recipe, stores: Stores, frozen: TrainingSet) -> None:
    finish(stores, frozen, "traced-1", {"c": 1.5})
    for file in list_sources(stores.source):
        stores.source.client.delete_object(Bucket=stores.source.bucket, Key=file.key)
    assert {file.now for file in trace_drafter(recipe).files} == {"vanished since"}


def test_a_file_knows_its_drafters(recipe: Recipe, stores: Stores, frozen: TrainingSet) -> None:
    finish(stores, frozen, "traced-1", {"c": 1.5, "d": 2.0})
    finish(stores, frozen, "traced-2", {"c": 2.5})
    assert [checkpoint.run for checkpoint, _ in drafters_of(recipe, "c")] == ["traced-1", "traced-2"]
    shown = text(recipe, None, "d")
    assert "traced-1" in shown
    assert "2.00" in shown
    assert "traced-2" not in shown
    assert "no finished drafter was trained on a%20%5B1%5D" in text(recipe, None, "a [1].jsonl")
    for wrong, sentence in (("cc", "no file cc in .* do you mean c"), ("x y", "no file x%20y in")):
        with pytest.raises(UserError, match=sentence):
            text(recipe, None, wrong)
    stores.source.client.delete_object(Bucket=stores.source.bucket, Key="in/d.jsonl")
    assert "traced-1" in text(recipe, None, "d"), "vanished, but trained on"
