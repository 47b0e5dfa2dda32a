"""The code location: loads fast and without torch, and has exactly this graph."""

import os
import subprocess
import sys
from pathlib import Path

import dagster as dg

from dflash_assets.definitions import defs, source_assets
from dflash_assets.dev import SCHEDULES, SENSORS
from dflash_assets.metadata import GROUP
from dflash_core.recipe import load_recipe
from dflash_core.shards.arrow import SCHEMA

REPOSITORY = Path(__file__).resolve().parents[2]

LINEAGE = {
    "generated_completions": set[str](),
    "raw_completions": {"generated_completions"},
    "tokenized_shards": {"raw_completions"},
    "loss_mask_stats": {"tokenized_shards"},
    "training_set": {"tokenized_shards", "loss_mask_stats"},
    "drafter_checkpoint": {"training_set"},
    "drafter_coverage": {"drafter_checkpoint"},
    "drafter_eval": {"drafter_checkpoint"},
    "drafter_export": {"drafter_checkpoint", "drafter_eval"},
}
STAGES = {"completions", "tokenization", "quality", "training", "evaluation", "drafter"}
PARTITIONED = {"generated_completions", "raw_completions", "tokenized_shards", "loss_mask_stats", "drafter_coverage"}
CHECKS = {
    "raw_completions: nothing_quarantined",
    "tokenized_shards: rows_conserved",
    "tokenized_shards: mask_invariants",
    "tokenized_shards: shards_current",
    "training_set: gate",
    "training_set: coverage",
    "training_set: sources_current",
    "drafter_checkpoint: trained_on_current_shards",
    "drafter_eval: lossless",
    "drafter_eval: acceptance",
    "drafter_eval: not_worse",
}


def test_lineage() -> None:
    graph = defs.resolve_asset_graph()
    nodes = [graph.get(key) for key in graph.get_all_asset_keys()]
    assert {node.key.to_user_string(): {key.to_user_string() for key in node.parent_keys} for node in nodes} == LINEAGE
    assert {node.key.to_user_string() for node in nodes if node.is_partitioned} == PARTITIONED


def test_a_recipe_without_generation_has_no_box_for_it() -> None:
    plain = load_recipe(REPOSITORY / "recipes/smollm2-135m_cpu.toml")
    assert plain.generation is None
    (files,) = source_assets(plain)
    deps = {key.to_user_string(): {dep.to_user_string() for dep in deps} for key, deps in files.asset_deps.items()}
    assert deps == {
        **{asset: LINEAGE[asset] for asset in ("tokenized_shards", "loss_mask_stats")},
        "raw_completions": set(),
    }


def test_everything_tells_what_it_is() -> None:
    graph = defs.resolve_asset_graph()
    for key in graph.get_all_asset_keys():
        node = graph.get(key)
        assert node.description
        assert node.owners
        assert node.kinds
        assert node.tags["stage"] in STAGES, key
        assert node.group_name == GROUP


def test_training_waits_for_the_gpu_and_tokenization_for_the_cores() -> None:
    pools = {asset.node_def.name: asset.op.pool for asset in _assets()}
    assert pools["drafter_checkpoint"] == pools["drafter_eval"] == "gpu"
    assert pools["completion_files"] == "cpu"


def test_nothing_runs_by_itself_until_switched_on() -> None:
    repository = defs.get_repository_def()
    assert {sensor.name for sensor in repository.sensor_defs} == set(SENSORS)
    assert {schedule.name for schedule in repository.schedule_defs} == set(SCHEDULES)
    assert {sensor.default_status.value for sensor in repository.sensor_defs} == {"STOPPED"}
    assert {schedule.default_status.value for schedule in repository.schedule_defs} == {"STOPPED"}


def test_names_are_the_files() -> None:
    files = {path.stem for path in (REPOSITORY / "dflash_assets").glob("*.py")}
    single = set(LINEAGE) - {"raw_completions", "tokenized_shards", "loss_mask_stats", "drafter_coverage"}
    assert single <= files
    assert "completion_files" in files


def test_loads_without_torch_in_seconds() -> None:
    program = (
        "import time; start = time.monotonic(); import dagster; imported = time.monotonic(); "
        "import dflash_assets.definitions, sys; "
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules, 'heavy import'; "
        "print((time.monotonic() - imported) / (imported - start))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 8, "our own imports, 1.4 times Dagster's on an idle machine, have become heavy"


def test_every_check_says_what_it_holds() -> None:
    graph = defs.resolve_asset_graph()
    found = {f"{key.asset_key.to_user_string()}: {key.name}" for key in graph.asset_check_keys}
    assert found == CHECKS
    for key in graph.asset_check_keys:
        assert graph.get(key).description, key


def test_shards_show_their_columns() -> None:
    schema = defs.resolve_asset_graph().get(dg.AssetKey("tokenized_shards")).metadata["dagster/column_schema"]
    columns = getattr(schema, "schema", schema)
    assert [column.name for column in columns.columns] == SCHEMA.names


def test_loading_says_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import dflash_assets.definitions"], capture_output=True, text=True, check=True
    )
    assert done.stdout + done.stderr == ""


def test_dg_finds_nothing_wrong(tmp_path: Path) -> None:
    (tmp_path / "dagster.yaml").write_text("telemetry:\n  enabled: false\n")
    done = subprocess.run(
        [sys.executable, "-c", "from dagster_dg_cli.cli import main; main()", "check", "defs"],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        env={**os.environ, "DAGSTER_HOME": str(tmp_path), "VIRTUAL_ENV": sys.prefix},
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "All definitions loaded successfully." in done.stdout + done.stderr
    assert "Warning" not in done.stderr


def _assets() -> list[dg.AssetsDefinition]:
    return [a for a in defs.assets or [] if isinstance(a, dg.AssetsDefinition) and a.is_executable]
