"""The CLI twins run the real path, and bad input is one sentence with exit code 2."""

import csv
import io
import json
import os
import re
import shutil
import subprocess
import sys
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest
import typer
from click.testing import Result
from typer.testing import CliRunner

from dflash_core import cli
from dflash_core.cli.app import at_exit
from dflash_core.errors import UserError
from dflash_core.recipe import StorageSettings
from dflash_core.records import SourceFile
from dflash_core.shards import pipeline
from dflash_core.shards.workers import FileDone
from dflash_core.storage.s3 import Store, make_client
from dflash_core.workspace import Workspace

REPOSITORY = Path(__file__).resolve().parent.parent


def dflash(*arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "dflash_assets.cli", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        check=False,
        timeout=120,
    )


@pytest.fixture
def recipe(bucket: str, tmp_path: Path) -> Path:
    path = tmp_path / "recipe.toml"
    path.write_text(
        f'name = "test"\n[source]\nbucket = "{bucket}"\nprefix = "in/"\n'
        f'[storage]\nbucket = "{bucket}"\nprefix = "out/"\nwork_dir = "{tmp_path}/work"\n'
        f'[target]\npath = "{REPOSITORY}/demo/target"\nlayers = 2\n[drafter]\nblock_size = 4\n'
        "[tokenization]\nworkers = 1\n"
    )
    return path


@pytest.fixture
def source(bucket: str) -> Store:
    return Store(make_client(StorageSettings(bucket=bucket)), bucket, "in/")


def completions(count: int, name: str = "") -> bytes:
    rows = [
        {
            "id": f"{name}{number}",
            "messages": [
                {"role": "user", "content": f"How many pears are in {name}{number} boxes?"},
                {"role": "assistant", "content": f"There are {number} boxes, so I count. " * (1 + number % 5)},
            ],
            "finish_reason": "stop",
        }
        for number in range(count)
    ]
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def test_verify_tokenize_freeze(recipe: Path, source: Store) -> None:
    source.put("a.jsonl", completions(30) + b"broken\n" * 5)
    source.put("b.jsonl", completions(20))
    source.put("c.jsonl", completions(1) + b'{"messages": [{"role": "[/INST]", "content": "x"}]}\n')
    verified = dflash("verify", "--recipe", str(recipe))
    assert verified.returncode == 0, verified.stderr
    assert verified.stdout.startswith("3 of 3 files read, 57 rows, 6 rejected")
    assert all(f"a.jsonl:{line}: invalid JSON" in verified.stderr for line in range(31, 36)), "every one is listed"
    assert "'[/INST]'" in verified.stderr
    tokenized = dflash("tokenize", "--recipe", str(recipe))
    assert tokenized.returncode == 0, tokenized.stderr
    assert "3 of 3 files, 0 of them still valid; 57 rows read: 51 kept, 0 dropped, 6 rejected" in tokenized.stdout
    assert "3 of them still valid" in dflash("tokenize", "--recipe", str(recipe)).stdout
    shown = dflash("inspect", "a:3", "--recipe", str(recipe))
    assert shown.returncode == 0, shown.stderr
    assert "How many pears are in" in shown.stdout
    nowhere = dflash("inspect", "a:3", "--recipe", str(recipe), "--html", str(recipe.parent / "no/such/folder.html"))
    assert nowhere.returncode == 2
    assert "check the path" in nowhere.stderr
    assert "Traceback" not in nowhere.stderr
    frozen = dflash("freeze", "--recipe", str(recipe))
    assert "gate failed" in frozen.stdout
    assert frozen.returncode == 1
    assert "repeat the text of another row" in frozen.stderr


def test_the_data_half_runs_where_torch_cannot_be_imported(recipe: Path, source: Store, tmp_path: Path) -> None:
    """In the worker processes, too, whose path is the caller's."""
    for name in ("torch", "transformers", "dagster"):
        (tmp_path / "without" / name).mkdir(parents=True)
        (tmp_path / "without" / name / "__init__.py").write_text(f"raise ImportError('no {name} here')")
    recipe.write_text(recipe.read_text().replace("workers = 1", "workers = 2"))
    for name in ("a", "b", "c"):
        source.put(f"{name}.jsonl", completions(5, name))

    def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-m", "dflash_core.cli", *arguments, "--recipe", str(recipe)]
        environment = {**os.environ, "PYTHONPATH": str(tmp_path / "without")}
        return subprocess.run(
            command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False, timeout=120
        )

    assert "3 of 3 files read, 15 rows, 0 rejected" in run("verify").stdout
    tokenized = run("tokenize")
    assert "3 of 3 files, 0 of them still valid; 15 rows read: 15 kept" in tokenized.stdout, tokenized.stderr
    assert "training set" in run("freeze").stdout
    assert "How many pears" in run("inspect", "a:2").stdout
    train = run("train")
    assert train.returncode
    assert "no torch here" in train.stderr


def test_no_files_outcome_is_kept_at_the_terminal(
    recipe: Path, source: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Else memory grows with the number of files: 110 KB of statistics each."""
    source.put("a.jsonl", completions(3))
    real, seen = pipeline.tokenize_files, list[weakref.ref[FileDone]]()

    def many(workspace: Workspace, sources: Sequence[SourceFile]) -> Iterator[FileDone]:
        (outcome,) = real(workspace, sources)
        assert isinstance(outcome, FileDone)
        for _ in range(20):
            one = replace(outcome)
            seen.append(weakref.ref(one))
            yield one
            del one
            assert sum(reference() is not None for reference in seen) <= 1

    monkeypatch.setattr(pipeline, "tokenize_files", many)
    with pytest.raises(typer.Exit):
        cli.data.tokenize(None, recipe)
    assert "20 of 1 files, 0 of them still valid; 60 rows read" in capsys.readouterr().out


@pytest.fixture
def three_files(recipe: Path, source: Store) -> Path:
    """The recipe of three tokenized files, with rows kept, dropped and rejected."""
    recipe.write_text(recipe.read_text() + "min_supervised_tokens = 12\n")
    short = json.dumps({"id": "short", "prompt": "q", "completion": "x"}).encode() + b"\n"
    for name in ("a", "b", "deep/c"):
        source.put(f"{name}.jsonl", completions(6, name) + short + b"broken\n")
    tokenized = dflash("tokenize", "--recipe", str(recipe))
    assert "24 rows read: 18 kept, 3 dropped, 3 rejected" in tokenized.stdout, tokenized.stderr
    return recipe


def test_rows_are_searched_and_given_in_every_form(three_files: Path, source: Store) -> None:
    def rows(*arguments: str) -> Result:
        """In this process, which has loaded everything."""
        with at_exit:
            return CliRunner().invoke(cli.app, ["rows", *arguments, "--recipe", str(three_files)])

    where = "line <= 2 AND finish_reason = 'stop'"
    shown = dflash("rows", where, "--recipe", str(three_files))
    assert shown.returncode == 0, shown.stderr
    assert (shown.stdout, shown.stderr) == (rows(where).stdout, rows(where).stderr)
    assert [line.split()[0] for line in shown.stdout.splitlines()] == [
        *("row", "a:1", "a:2", "b:1", "b:2", "deep%2Fc:1", "deep%2Fc:2")
    ]
    assert shown.stderr == "6 of 18 rows (33.3 %) in 3 of 3 files\n"

    lines = [json.loads(line) for line in rows(where, "--json").stdout.splitlines()]
    assert [(line["file"], line["line"], line["row_id"]) for line in lines[:2]] == [("a", 1, "a0"), ("a", 2, "a1")]
    assert lines[0].keys() == {"file", "line", "row_id", "tokens", "supervised_tokens", "finish_reason", "flags"}
    table = list(csv.DictReader(io.StringIO(rows(where, "--csv").stdout)))
    assert [{name: str(value) for name, value in line.items()} for line in lines] == table

    limited = rows("true", "b", "deep*", "--limit", "3", "--json")
    assert [json.loads(line)["row_id"] for line in limited.stdout.splitlines()] == ["b0", "b1", "b2"]
    assert limited.stderr == "12 of 12 rows (100.0 %) in 2 of 2 files, 3 of them shown (--limit)\n"
    ranged = rows("line = 1", "a..b", "--csv")
    assert len(ranged.stdout.splitlines()) == 3
    assert "2 of 12 rows" in ranged.stderr
    assert rows("true", "--limit", "0", "--json").stdout == ""
    nothing = rows("tokens < 0")
    assert (nothing.exit_code, nothing.stderr) == (0, "0 of 18 rows (0.0 %) in 0 of 3 files\n")

    source.put("b.jsonl", completions(2, "new"))
    assert rows("true").stderr == "12 of 12 rows (100.0 %) in 2 of 2 files; without a valid shard: 1 files\n"
    for arguments, sentence in (
        (("nope = 1",), "is not a condition on rows: unable to find column"),
        (("1=1; DROP TABLE rows",), "is not a condition on rows"),
        (("line IN (SELECT line FROM rows)",), "is not a condition on rows"),
        (("true", "--json", "--csv"), "give --json or --csv, not both"),
        (("true", "z*"), "no source file for z*; there are 3"),
        (("true", "b"), "none of these files has a valid shard; tokenize them first"),
    ):
        refused = rows(*arguments)
        assert isinstance(refused.exception, UserError)
        assert sentence in str(refused.exception)
        assert "\n" not in str(refused.exception)
        assert refused.stdout == refused.stderr == ""
    refused = dflash("rows", "1=1; DROP TABLE rows", "--recipe", str(three_files))
    assert refused.returncode == 2
    assert refused.stderr.startswith("error: '1=1; DROP TABLE rows' is not a condition on rows: ")
    assert refused.stderr.strip().count("\n") == 0


def test_a_row_is_written_as_a_page(three_files: Path) -> None:
    page = three_files.parent / "row.html"
    shown = dflash("inspect", "deep/c.jsonl:deep/c1", "--html", str(page), "--recipe", str(three_files))
    assert shown.stdout == f"{page}\n", shown.stderr
    text = unescape(re.sub("<[^>]*>", "", page.read_text().partition("<pre>")[2]))
    assert "How many pears are in deep/c1 boxes?" in text
    dropped = dflash("inspect", "a:short", "--recipe", str(three_files))
    assert "in no shard: too few supervised tokens; rendered again from the source file" in dropped.stdout


def test_a_failed_file_is_named_once(recipe: Path, source: Store) -> None:
    source.put("a.jsonl", completions(5))
    source.put("cut.jsonl.gz", b"\x1f\x8b\x08")
    failed = dflash("tokenize", "--recipe", str(recipe))
    assert failed.returncode == 1
    assert failed.stderr.count("cut.jsonl.gz") == 1


@pytest.mark.parametrize(
    ("wrong", "right", "sentence"),
    [
        ("in/", "elsewhere/", "holds no file of completions"),
        ("demo/target", "demo/nothing", "demo/nothing"),
        ("block_size", "blok_size", "drafter.blok_size: no such key"),
        ("[source]\nbucket = ", '[source]\nbucket = "no-such-bucket" # ', "bucket 'no-such-bucket' does not exist"),
    ],
)
def test_bad_input_is_one_sentence(recipe: Path, source: Store, wrong: str, right: str, sentence: str) -> None:
    source.put("a.jsonl", completions(3))
    recipe.write_text(recipe.read_text().replace(wrong, right))
    refused = dflash("tokenize", "--recipe", str(recipe))
    assert refused.returncode == 2, refused.stdout + refused.stderr
    assert sentence in refused.stderr
    assert "Traceback" not in refused.stderr
    assert refused.stderr.strip().count("\n") == 0


def test_a_target_without_a_chat_template_is_named(recipe: Path, source: Store, tmp_path: Path) -> None:
    source.put("a.jsonl", completions(3))
    bare = tmp_path / "bare"
    shutil.copytree(REPOSITORY / "demo/target", bare, ignore=shutil.ignore_patterns("chat_template.jinja"))
    recipe.write_text(recipe.read_text().replace(f"{REPOSITORY}/demo/target", str(bare)))
    refused = dflash("tokenize", "--recipe", str(recipe))
    assert refused.returncode == 2, refused.stdout + refused.stderr
    assert "chat template" in refused.stderr
    assert str(bare) in refused.stderr
    assert "Traceback" not in refused.stderr


def test_wrong_credentials(recipe: Path, source: Store) -> None:
    source.put("a.jsonl", completions(3))
    refused = dflash("tokenize", "--recipe", str(recipe), AWS_SECRET_ACCESS_KEY="wrong")
    assert refused.returncode == 2
    assert "refuses the credentials" in refused.stderr


def test_nothing_to_train_on(recipe: Path, source: Store) -> None:
    refused = dflash("train", "--recipe", str(recipe))
    assert refused.returncode == 2
    assert "Traceback" not in refused.stderr
    assert "training set" in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("evaluate",), "holds no finished run; train a drafter first"),
        (("evaluate", "r9"), "holds no finished run 'r9'; train a drafter first"),
        (("export", "r9"), "holds no finished run 'r9'; train a drafter first"),
        (("serve-check", "r9", "--url", "http://127.0.0.1:9"), "holds no finished run 'r9'; train a drafter first"),
        (("diagnose",), "holds no finished run; train a drafter first"),
        (("diagnose", "r9"), "holds no finished run 'r9'; train a drafter first"),
        (("diagnose", "no-such/folder"), "no-such/folder/config.json cannot be read"),
        (("diagnose", "docs"), "docs/config.json cannot be read"),
    ],
)
def test_a_drafter_that_is_not_there_is_one_sentence(recipe: Path, arguments: tuple[str, ...], sentence: str) -> None:
    refused = dflash(*arguments, "--recipe", str(recipe))
    assert refused.returncode == 2, refused.stdout + refused.stderr
    assert sentence in refused.stderr
    assert "Traceback" not in refused.stderr
    assert refused.stderr.strip().count("\n") == 0
