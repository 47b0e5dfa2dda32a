"""The chain behind a drafter, down to file and line; and the drafters that learned from a file."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dflash_core.cli import drafter as commands
from dflash_core.cli.app import app, at_exit
from dflash_core.errors import UserError
from dflash_core.lineage import drafters_of, trace_drafter, trace_rows
from dflash_core.recipe import load_recipe
from dflash_core.records import DrafterCheckpoint, FileCoverage, RunPointer, StoredObject, TrainingSet
from dflash_core.shards.pipeline import tokenize_files
from dflash_core.storage.layout import LATEST_RUN, RunKeys, ShardKeys
from dflash_core.storage.partitions import list_sources
from dflash_core.training_set.freeze import freeze_training_set
from dflash_core.workspace import Workspace, connect

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
def recipe_file(bucket: str, tmp_path: Path) -> Path:
    path = tmp_path / "recipe.toml"
    path.write_text(
        f'name = "traced"\n[source]\nbucket = "{bucket}"\nprefix = "in/"\n'
        f'[storage]\nbucket = "{bucket}"\nprefix = "out/"\nwork_dir = "{tmp_path}"\n'
        f'[target]\npath = "{REPOSITORY}/demo/target"\nlayers = 2\n[drafter]\nblock_size = 4\n'
        "[tokenization]\nworkers = 1\nmin_supervised_tokens = 12\n"
    )
    return path


@pytest.fixture
def workspace(recipe_file: Path) -> Workspace:
    return connect(load_recipe(recipe_file))


@pytest.fixture
def frozen(workspace: Workspace) -> TrainingSet:
    """Three files, the first with a line that is not a row and one that is too short."""
    short = json.dumps({"id": "short", "prompt": "q", "completion": "x"}).encode() + b"\n"
    workspace.source.put("a [1].jsonl", completions("a", 3) + b"broken\n" + completions("b", 2) + short)
    workspace.source.put("c.jsonl", completions("c", 4))
    workspace.source.put("d.jsonl", completions("d", 4))
    tokenize(workspace)
    return freeze_training_set(workspace)


def tokenize(workspace: Workspace) -> None:
    list(tokenize_files(workspace, list_sources(workspace.source)))


def finish(workspace: Workspace, frozen: TrainingSet, run: str, prefixes: dict[str, float]) -> None:
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
        settings=StoredObject(key=RunKeys(run).settings, size=1, sha256="b" * 64),
        skipped_steps=0,
        skipped_rows=0,
    )
    workspace.derived.put_record(RunKeys(run).manifest, checkpoint)
    workspace.derived.put_record(LATEST_RUN, RunPointer(run=run))


def text(recipe_file: Path, *arguments: str) -> str:
    """What `dflash lineage` prints."""
    with at_exit:
        done = CliRunner().invoke(app, ["lineage", *arguments, "--recipe", str(recipe_file)])
    if done.exception is not None:
        raise done.exception
    return done.stdout


def test_the_chain_goes_down_to_file_and_line(
    recipe_file: Path, workspace: Workspace, frozen: TrainingSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    hostile = frozen.shards[0].partition
    finish(workspace, frozen, "traced-1", {hostile: 3.0, "c": 1.5})
    workspace.source.put("c.jsonl", completions("changed", 4))
    workspace.source.delete("d.jsonl")

    lineage = trace_drafter(workspace)
    assert lineage.files["partition"].to_list() == ["c", hostile, "d"], "the worst learned first"
    assert lineage.files["state"].to_list() == ["changed since", "unchanged", "vanished since"]
    assert lineage.files["rows_rejected"].to_list() == [0, 1, 0]
    assert lineage.files["rows_dropped"].to_list() == [0, 1, 0]
    assert lineage.files["trained_rows"].to_list() == [9, 9, None], "the training came to no row of d"
    rows = trace_rows(workspace, lineage, hostile)
    assert rows["line"].to_list() == [1, 2, 3, 5, 6], "line 4 is not a row"
    assert (rows["tokens"] > rows["supervised_tokens"]).all()
    assert rows["supervised_tokens"].sum() == frozen.shards[0].supervised_tokens
    assert rows["tokens"].sum() == frozen.shards[0].tokens

    shown = text(recipe_file)
    for part in (
        frozen.hash,
        frozen.fingerprint,
        "training code 7",
        "drafter_checkpoint/traced-1/recipe.json  sha256 bbbbbbbbbbbb",
        "target target-1",
        "a [1].jsonl",
        "5 rows, 1 dropped, 1 rejected",
        "learned from 9 rows, 99 tokens: mean loss 0.500, accepted prefix 1.50",
        "no row was trained on",
    ):
        assert part in shown
    assert frozen.shards[0].source_etag[:12] in shown
    monkeypatch.setattr(commands, "LINEAGE_FILES", 1)
    assert "and 2 more files" in text(recipe_file, "traced-1")
    assert text(recipe_file, "traced-1", "--all") == shown
    lines = text(recipe_file, "traced-1", "--file", hostile)
    for path in ("a [1].jsonl", "a [1]"):
        assert text(recipe_file, "traced-1", "--file", path) == lines
    assert f"{frozen.shards[0].source_uri}:5  b-0" in lines
    with pytest.raises(UserError, match="traced-1 was not trained on e; it was on 3 files"):
        text(recipe_file, "traced-1", "--file", "e")
    with pytest.raises(UserError, match="no finished run 'none'"):
        text(recipe_file, "none")


def test_a_file_that_was_tokenized_again_says_nothing_of_the_rows_it_lost_then(
    recipe_file: Path, workspace: Workspace, frozen: TrainingSet
) -> None:
    finish(workspace, frozen, "traced-1", {"c": 1.5})
    workspace.source.put("c.jsonl", completions("changed", 4) + b"broken\n")
    tokenize(workspace)
    workspace.derived.delete(ShardKeys(frozen.fingerprint, "d").manifest)
    files = trace_drafter(workspace).files
    assert dict(zip(files["partition"], files["rows_rejected"], strict=True)) == {
        "c": None,
        frozen.shards[0].partition: 1,
        "d": None,
    }
    assert text(recipe_file).count("tokenized again since") == 2


def test_an_emptied_source_leaves_the_chain(workspace: Workspace, frozen: TrainingSet) -> None:
    finish(workspace, frozen, "traced-1", {"c": 1.5})
    for listed in list(workspace.source.list()):
        workspace.source.delete(listed.key)
    assert set(trace_drafter(workspace).files["state"]) == {"vanished since"}


def test_a_file_knows_its_drafters(recipe_file: Path, workspace: Workspace, frozen: TrainingSet) -> None:
    finish(workspace, frozen, "traced-1", {"c": 1.5, "d": 2.0})
    finish(workspace, frozen, "traced-2", {"c": 2.5})
    found = drafters_of(workspace, "c")
    assert found["run"].to_list() == ["traced-1", "traced-2"]
    assert found["accepted_prefix"].to_list() == [1.5, 2.5]
    assert found["training_set"].to_list() == [frozen.hash] * 2
    shown = text(recipe_file, "--file", "d")
    assert "traced-1" in shown
    assert "2.00" in shown
    assert "traced-2" not in shown
    assert "no finished drafter was trained on a%20%5B1%5D" in text(recipe_file, "--file", "a [1].jsonl")
    for wrong, sentence in (("cc", "no file cc in .* do you mean c"), ("x y", "no file x%20y in")):
        with pytest.raises(UserError, match=sentence):
            text(recipe_file, "--file", wrong)
    workspace.source.delete("d.jsonl")
    assert "traced-1" in text(recipe_file, "--file", "d"), "vanished, but trained on"
