"""`dflash rows`: exactly the rows for which a condition holds, and nothing but a condition is taken."""

import json
from collections.abc import Mapping

import polars as pl
import pytest

from dflash_core.errors import UserError
from dflash_core.records import ShardManifest
from dflash_core.shards import query
from dflash_core.shards.arrow import read_shard
from dflash_core.shards.query import COLUMNS, SHOWN, find_rows, rows_table
from dflash_core.shards.workers import FileDone
from dflash_core.tokenization.flags import Flag
from dflash_core.workspace import Workspace, connect
from tests.shards.files import tokenized
from tests.tokenization.conftest import MakeRecipe

ANSWER = "The quick brown fox jumps over the lazy dog."
THOUGHT = {"reasoning_content": "hm"}


def body(*lines: dict[str, object]) -> bytes:
    rows = [{"prompt": f"q {i}", "completion": f"{ANSWER} {i}", **line} for i, line in enumerate(lines)]
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


@pytest.fixture(scope="module")
def workspace(make_recipe: MakeRecipe, module_bucket: str) -> Workspace:
    """Rows of every finish reason, with and without a thought, one cut, one dropped, one rejected."""
    workspace = connect(make_recipe(bucket=module_bucket, max_length=200, min_supervised_tokens=9))
    stop, length = {"finish_reason": "stop"}, {"finish_reason": "length"}
    first = body({"id": "a0", **stop}, {"id": "a1", **length}, {"id": "a2", "completion": "x"}, {"id": "a3"})
    workspace.source.put("a.jsonl", first + b"{ half\n")
    second = [{"id": "b0", **stop, **THOUGHT}, {"id": "b1", **stop, "completion": ANSWER * 20}, {"id": "it's", **stop}]
    workspace.source.put("deep/b.jsonl", body(*second))
    workspace.source.put("hollow.jsonl", b"{ half\n")
    tokenized(workspace)
    return workspace


@pytest.fixture(scope="module")
def manifests(workspace: Workspace) -> list[ShardManifest]:
    """Of all files, also of the one without a row."""
    keys = [listed.key for listed in workspace.derived.list("tokenized_shards/") if listed.key.endswith(".json")]
    return [workspace.derived.get_record(key, ShardManifest) for key in keys]


@pytest.fixture(scope="module")
def stored(workspace: Workspace, manifests: list[ShardManifest]) -> list[dict[str, object]]:
    """Every row as it is in its shard."""
    rows = []
    for manifest in sorted(manifests, key=lambda manifest: manifest.source.partition):
        for row in read_shard(workspace.derived.read(manifest.shard)).to_pylist():
            rows.append({**row, "file": manifest.source.partition, "tokens": len(row["input_ids"])})
    return rows


def ids(found: pl.DataFrame) -> list[str]:
    return found["row_id"].to_list()


def test_every_row_is_shown_as_it_is_stored(workspace: Workspace, manifests, stored) -> None:
    found = find_rows(workspace, manifests, "true")
    assert tuple(found.columns) == (*SHOWN, "flags")
    assert len(found) == len(stored) == 6
    for shown, row in zip(found.iter_rows(named=True), stored, strict=True):
        flags = ", ".join((flag.name or "").lower().replace("_", " ") for flag in Flag(row["flags"]))
        assert shown == {
            "file": row["file"],
            "line": row["source_line"],
            "row_id": row["row_id"],
            "tokens": row["tokens"],
            "supervised_tokens": row["completion_tokens"],
            "finish_reason": row["finish_reason"],
            "flags": flags,
        }


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("file = 'a'", ["a0", "a1", "a3"]),
        ("file LIKE 'deep%'", ["b0", "b1", "it's"]),
        ("file = 'hollow'", []),
        ("line = 1", ["a0", "b0"]),
        ("line BETWEEN 2 AND 3", ["a1", "b1", "it's"]),
        ("row_id = 'it''s'", ["it's"]),
        ("row_id ~ '^[ab]0$'", ["a0", "b0"]),
        ("tokens = 200", ["b1"]),
        ("tokens > 100 AND prompt_tokens > 100", []),
        ("prompt_tokens < 100 AND NOT clipped", ["a0", "a1", "a3", "b0", "it's"]),
        ("supervised_tokens > 100", ["b1"]),
        ("supervised_tokens + prompt_tokens = tokens", ["a1", "b1"]),
        ("finish_reason = 'stop'", ["a0", "b0", "b1", "it's"]),
        ("finish_reason = 'length' OR finish_reason = 'unknown'", ["a1", "a3"]),
        ("finish_reason IN ('length', 'tool_calls')", ["a1"]),
        ("finish_reason <> 'stop'", ["a1", "a3"]),
        ("thought", ["b0"]),
        ("NOT thought AND finish_reason = 'stop'", ["a0", "b1", "it's"]),
        ("empty_thought IS TRUE", ["a0", "a1", "a3", "b1", "it's"]),
        ("no_terminator", ["a1", "b1"]),
        ("no_terminator AND clipped", ["b1"]),
        ("truncated_by_length", ["a1"]),
        ("tool_calls OR drift OR engine_ids", []),
        ("supervised_tokens = max(supervised_tokens)", ["b1"]),
        ("tokens > 0 -- a comment", ["a0", "a1", "a3", "b0", "b1", "it's"]),
        ("row_id = 'select'", []),
    ],
)
def test_a_condition_on_any_column_finds_the_rows_in_file_order(
    workspace: Workspace, manifests, where: str, expected: list[str]
) -> None:
    assert ids(find_rows(workspace, manifests, where)) == expected


@pytest.mark.parametrize("where", ["supervised_tokens = max(supervised_tokens)", "tokens = max(tokens)", "true"])
def test_files_are_read_a_few_at_a_time_and_compared_all_with_all(
    workspace: Workspace, manifests, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once = find_rows(workspace, manifests, where)
    sizes = []

    def counted(workspace: Workspace, partitions: Mapping[str, str]) -> pl.LazyFrame:
        sizes.append(len(partitions))
        return rows_table(workspace, partitions)

    monkeypatch.setattr(query, "FILES_AT_ONCE", 1)
    monkeypatch.setattr(query, "rows_table", counted)
    assert find_rows(workspace, manifests, where).equals(at_once)
    assert max(sizes) == 1
    assert at_once["tokens"].null_count() == 0


@pytest.mark.parametrize("column", COLUMNS)
def test_every_column_can_be_named_and_has_a_value(workspace: Workspace, manifests, column: str) -> None:
    assert len(find_rows(workspace, manifests, f"{column} IS NOT NULL")) == 6


@pytest.mark.parametrize("flag", list(Flag), ids=lambda flag: flag.name)
def test_each_flag_is_its_bit(workspace: Workspace, manifests, stored, flag: Flag) -> None:
    expected = [row["row_id"] for row in stored if row["flags"] & flag]
    assert ids(find_rows(workspace, manifests, (flag.name or "").lower())) == expected


def test_only_the_given_files_are_searched(workspace: Workspace, manifests) -> None:
    one = [manifest for manifest in manifests if manifest.source.partition == "a"]
    assert ids(find_rows(workspace, one, "true")) == ["a0", "a1", "a3"]


@pytest.mark.parametrize("where", ["true", "finish_reason = 'stop'", "thought AND tokens > 3"])
def test_no_row_is_an_empty_table_of_the_same_columns(workspace: Workspace, manifests, where: str) -> None:
    hollow = [manifest for manifest in manifests if not manifest.rows_kept]
    assert len(hollow) == 1
    for found in (find_rows(workspace, hollow, where), find_rows(workspace, [], where)):
        assert tuple(found.columns) == (*SHOWN, "flags")
        assert found.is_empty()
    assert find_rows(workspace, manifests, "tokens < 0").schema == find_rows(workspace, manifests, where).schema


@pytest.mark.parametrize(
    ("where", "why"),
    [
        ("nope = 1", 'unable to find column "nope"'),
        ("input_ids IS NULL", 'unable to find column "input_ids"'),
        ("flags = 3", 'unable to find column "flags"'),
        ("tokens <", "unable to parse"),
        ("", "unable to parse"),
        ("'", "Unterminated string literal"),
        ("1=1)", "unexpected token"),
        ("nope(1)", "unsupported function"),
        ("tokens", "not true or false of each row"),
        ("1", "not true or false of each row"),
        ("NULL", "not true or false of each row"),
        ("tokens = 'x'", "cannot compare"),
        ("finish_reason = 3", "cannot compare"),
        ("row_id ~ '('", "regex parse error"),
        ("COLUMNS('.*') > 1", "is not a condition on rows"),
        ("1=1; DROP TABLE rows", "unexpected token"),
        ("1=1; SELECT 1", "selects something itself"),
        ("1=1 LIMIT 1", "LIMIT"),
        ("1=1 GROUP BY file", "GROUP"),
        ("1=1 UNION SELECT * FROM rows", "selects something itself"),
        ("line IN (SELECT line FROM rows)", "selects something itself"),
        ("line IN (select * from read_csv('/etc/passwd'))", "selects something itself"),
        ("tokens > ANY (SELECT 1)", "selects something itself"),
        ("read_csv('/etc/passwd')", "unsupported function"),
        ("\x00", "unable to parse"),
        ("🦄 = 1", "unable to parse"),
    ],
)
def test_what_is_not_a_condition_is_one_sentence_that_names_the_columns(
    workspace: Workspace, manifests, where: str, why: str
) -> None:
    with pytest.raises(UserError) as refused:
        find_rows(workspace, manifests, where)
    sentence = str(refused.value)
    assert sentence.startswith(f"{where!r} is not a condition on rows: ")
    assert why in sentence
    assert sentence.endswith(f"; it may name {', '.join(COLUMNS)}")
    assert "\n" not in sentence
    assert "root:" not in sentence


def test_a_condition_that_fails_on_a_row_is_one_sentence(workspace: Workspace, manifests) -> None:
    with pytest.raises(UserError, match=r"^the rows cannot be searched: ") as refused:
        find_rows(workspace, manifests, "CAST(row_id AS INT) > 0")
    assert "\n" not in str(refused.value)


def test_a_shard_that_is_gone_is_one_sentence(workspace: Workspace, manifests) -> None:
    moved = [m.model_copy(update={"shard": m.shard.model_copy(update={"key": "gone.arrow"})}) for m in manifests]
    with pytest.raises(UserError, match=r"gone\.arrow") as refused:
        find_rows(workspace, moved, "true")
    assert "\n" not in str(refused.value)


def test_outcomes_and_manifests_agree(workspace: Workspace, manifests) -> None:
    done = [outcome.manifest for outcome in tokenized(workspace).values() if isinstance(outcome, FileDone)]
    assert find_rows(workspace, done, "true").equals(find_rows(workspace, manifests, "true"))
