"""Files of a source with shards as tokenization leaves them, from statistics from a line a row."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from dflash_core.recipe import GateSettings, Recipe, SourceSettings, StorageSettings, TargetSettings
from dflash_core.records import Reject, ShardManifest, SourceFile
from dflash_core.statistics.statistics import FileStatistics
from dflash_core.storage.layout import ShardKeys
from dflash_core.storage.partitions import list_sources
from dflash_core.storage.s3 import Store
from dflash_core.tokenization.tokenizer import fingerprint
from dflash_core.workspace import Workspace, connect
from tests.shards.conftest import folders, make_recipe, workspace_of
from tests.statistics.conftest import MakeFile, make_file, row
from tests.statistics.rows import Row

__all__ = ["folders", "make_file", "make_recipe", "row", "workspace_of"]
TARGET = Path(__file__).resolve().parents[2] / "demo" / "target"
NAMES = [f"file_{k:02}" for k in range(12)]
GOOD = [40 + 3 * i for i in range(120)]
Tokenize = Callable[..., None]


@pytest.fixture
def workspace(bucket: str) -> Workspace:
    """Twelve files, none of them tokenized."""
    recipe = Recipe(
        name="test",
        source=SourceSettings(bucket=bucket, prefix="completions/"),
        storage=StorageSettings(bucket=bucket, prefix="derived/", downloads=8),
        target=TargetSettings(path=TARGET),
        gate=GateSettings(min_coverage=0.8),
    )
    workspace = connect(recipe)
    for name in NAMES:
        workspace.source.put(f"{name}.jsonl", name.encode())
    return workspace


@pytest.fixture
def tokenize(workspace: Workspace, make_file: MakeFile) -> Tokenize:
    """Stand-in for tokenization: a shard of any bytes, true statistics, and the manifest last."""
    own = fingerprint(workspace.recipe)

    def tokenize(names: Sequence[str] = NAMES, supervised: Sequence[int | Row] = GOOD, fingerprint: str = own) -> None:
        rows = [one if isinstance(one, Row) else Row(one) for one in supervised]
        for source in list_sources(workspace.source):
            if source.partition in names:
                found = make_file(source.partition, rows, ["no JSON"])
                keys = ShardKeys(fingerprint, source.partition)
                workspace.derived.put_record(keys.manifest, _manifest(workspace.derived, source, found, keys))

    return tokenize


def _manifest(derived: Store, source: SourceFile, found: FileStatistics, keys: ShardKeys) -> ShardManifest:
    return ShardManifest(
        fingerprint=keys.fingerprint,
        code_version="1",
        source=source,
        source_sha256="0" * 64,
        shard=derived.put(keys.shard, b"shard"),
        statistics=derived.put(keys.statistics, found.model_dump_json().encode()),
        rejects=derived.put(keys.rejects, Reject(line=found.lines_read, reason="no JSON").model_dump_json().encode()),
        rows_read=found.rows_read,
        rows_kept=found.rows_kept,
        rows_dropped=found.rows_dropped,
        rows_rejected=found.rows_rejected,
        drop_reasons=found.dropped,
        reject_reasons=found.rejected,
        tokens=found.tokens,
        supervised_tokens=found.supervised_tokens,
    )
