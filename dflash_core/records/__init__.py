"""The records that travel between stages and into manifests: frozen, JSON in and out, no behaviour beyond that."""

from dflash_core.records.base import OnProgress, Record, StoredObject
from dflash_core.records.data import (
    GeneratedFile,
    Reject,
    ShardManifest,
    SourceFile,
    TrainingSet,
    TrainingSetPointer,
    TrainingSetShard,
    Verdict,
)
from dflash_core.records.drafter import (
    LEAST_PROMPTS,
    AcceptanceCut,
    CutKind,
    DrafterCheckpoint,
    DrafterEval,
    DrafterExport,
    FileCoverage,
    PreviousDrafter,
    RunPointer,
    SavedStep,
    ServeCheck,
    StopExample,
)

__all__ = [
    "LEAST_PROMPTS",
    "AcceptanceCut",
    "CutKind",
    "DrafterCheckpoint",
    "DrafterEval",
    "DrafterExport",
    "FileCoverage",
    "GeneratedFile",
    "OnProgress",
    "PreviousDrafter",
    "Record",
    "Reject",
    "RunPointer",
    "SavedStep",
    "ServeCheck",
    "ShardManifest",
    "SourceFile",
    "StopExample",
    "StoredObject",
    "TrainingSet",
    "TrainingSetPointer",
    "TrainingSetShard",
    "Verdict",
]
