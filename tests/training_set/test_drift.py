"""A training set is stale when a file in it changed or vanished; new files alone make nothing wrong."""

from dflash_core.records import SourceFile, TrainingSet
from dflash_core.storage.partitions import list_sources
from dflash_core.training_set.drift import drift_of
from dflash_core.training_set.freeze import freeze_training_set
from dflash_core.workspace import Workspace
from tests.training_set.conftest import NAMES, Tokenize


def test_each_kind_of_difference_is_named(workspace: Workspace, tokenize: Tokenize) -> None:
    tokenize(NAMES[:11])
    frozen: TrainingSet = freeze_training_set(workspace)
    sources: list[SourceFile] = list_sources(workspace.source)
    same = drift_of(frozen, sources)
    assert (same.changed, same.vanished, same.new, same.stale) == ((), (), (), False), "one was missing already"
    assert str(same) == "no file changed, vanished or new"
    workspace.source.put("new.jsonl", b"x")
    grown = drift_of(frozen, list_sources(workspace.source))
    assert (grown.new, grown.stale) == (("new",), False)
    workspace.source.put("file_03.jsonl", b"changed")
    workspace.source.delete("file_04.jsonl")
    other = drift_of(frozen, list_sources(workspace.source))
    assert (other.changed, other.vanished, other.new, other.stale) == (("file_03",), ("file_04",), ("new",), True)
    assert str(other) == "1 changed (file_03), 1 vanished (file_04), 1 new (new)"
