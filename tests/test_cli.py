"""The CLI twins run the real path, and bad input is one sentence with exit code 2."""

import json
import os
import shutil
import subprocess
import sys
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import typer

from dflash_core import cli
from dflash_core.recipe import Recipe, Storage
from dflash_core.records import SourceFile
from dflash_core.storage.store import Store, make_client
from dflash_core.tokenization import pipeline

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
    return Store(make_client(Storage(bucket=bucket)), bucket, "in/")


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
    assert "3 of 3 files, 0 of them still valid: 57 rows read, 51 kept, 6 rejected" in tokenized.stdout
    assert "3 of them still valid" in dflash("tokenize", "--recipe", str(recipe)).stdout
    shown = dflash("inspect", "a:3", "--recipe", str(recipe))
    assert shown.returncode == 0, shown.stderr
    assert "How many pears are in" in shown.stdout
    nowhere = dflash("inspect", "a:3", "--recipe", str(recipe), "--html", str(recipe.parent / "no/such/folder.html"))
    assert nowhere.returncode == 2
    assert "check the path" in nowhere.stderr
    assert "Traceback" not in nowhere.stderr
    frozen = dflash("freeze", "--recipe", str(recipe))
    assert "gate: fail" in frozen.stdout
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
    assert "3 of 3 files, 0 of them still valid: 15 rows read, 15 kept" in tokenized.stdout, tokenized.stderr
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
    real, seen = pipeline.process_files, list[weakref.ref[pipeline.FileDone]]()

    def many(settings: Recipe, sources: Sequence[SourceFile]) -> Iterator[pipeline.FileDone]:
        (outcome,) = real(settings, sources)
        assert isinstance(outcome, pipeline.FileDone)
        for _ in range(20):
            one = replace(outcome)
            seen.append(weakref.ref(one))
            yield one
            del one
            assert sum(reference() is not None for reference in seen) <= 1

    monkeypatch.setattr(pipeline, "process_files", many)
    with pytest.raises(typer.Exit):
        cli.data.tokenize(None, recipe)
    assert "20 of 1 files, 0 of them still valid: 60 rows read" in capsys.readouterr().out


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
