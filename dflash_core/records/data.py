"""From the source files to the training set.

Rows: read = kept + dropped + rejected. *Rejected* rows were never rendered, *dropped* ones were and a policy left them
out; both with reasons. Records from before TOKENIZATION_VERSION 4 know no dropped rows: their `rows_rejected` and
`reject_reasons` hold both kinds, and `rows_dropped` is None.
"""

from dflash_core.records.base import Record, StoredObject


class SourceFile(Record):
    """One object with completions, as listed."""

    partition: str
    """Partition key: the encoded path below the source prefix."""
    key: str
    """Full object key in the source bucket."""
    uri: str
    etag: str
    size: int


class Reject(Record):
    """One input row that is not in the shard, and why. `line` counts from 1."""

    line: int
    reason: str
    detail: str = ""


class ShardManifest(Record):
    """What one source file became; written last, so its presence means that everything it names is whole."""

    fingerprint: str
    code_version: str
    source: SourceFile
    source_sha256: str
    shard: StoredObject
    statistics: StoredObject
    rejects: StoredObject
    """Every row that is not in the shard, rejected or dropped: JSON lines of `Reject`."""
    rows_read: int
    rows_kept: int
    rows_dropped: int | None = None
    rows_rejected: int
    drop_reasons: dict[str, int] | None = None
    """Reason -> rows, as in the next field."""
    reject_reasons: dict[str, int]
    tokens: int
    supervised_tokens: int


class GeneratedFile(Record):
    """What one file of prompts became; generated_completions/<partition>/manifest.json, written last.

    lines = written + sum(dropped): every line of the prompts is in the completions or has its reason.
    """

    code_version: str = "1"
    """Of the code that hashed the settings; hashes of another version cannot be compared."""
    partition: str
    request_hash: str
    """Of everything but the prompts that decides the answers."""
    policy_hash: str
    """Of what decides which answers are kept."""
    prompts: SourceFile
    prompts_sha256: str
    model: str
    servers: tuple[str, ...]
    completions: StoredObject
    """Its key is relative to the source's prefix."""
    completions_uri: str
    rejects: StoredObject
    """Every dropped line with its reason, JSON lines."""
    lines: int
    written: int
    dropped: dict[str, int]
    """Reason -> lines."""
    outcomes: dict[str, int]
    """Outcome -> prompts, whatever the policy made of them."""
    cut_in_thought: int
    """Of the truncated ones."""
    asked: int
    """Requests answered in this run; the others were answered in earlier ones."""
    prompt_tokens: int
    completion_tokens: int
    completion_histogram: dict[int, int]
    """Completion tokens -> written rows."""
    answer_seconds: dict[int, int]
    """Seconds an answer took, rounded up -> written rows."""
    seconds: float
    """Of this run."""


class Verdict(Record):
    """What the gate said. Reasons name files, rows and numbers."""

    passed: bool
    reasons: tuple[str, ...]


class TrainingSetShard(Record):
    """One file's part of a training set."""

    partition: str
    source_uri: str
    source_etag: str
    source_sha256: str
    shard: StoredObject
    rows: int
    tokens: int
    supervised_tokens: int


class TrainingSet(Record):
    """A frozen selection of shards plus the gate's verdict on them. `hash` is the sha256 of everything else in here."""

    hash: str
    recipe: str
    fingerprint: str
    shards: tuple[TrainingSetShard, ...]
    """Sorted by partition."""
    missing: tuple[str, ...]
    """Partitions of the source that have no valid shard, or one without a row."""
    coverage: float
    rows_read: int
    rows_kept: int
    rows_dropped: int | None = None
    rows_rejected: int
    drop_reasons: dict[str, int] | None = None
    reject_reasons: dict[str, int]
    tokens: int
    supervised_tokens: int
    statistics: StoredObject
    """The merged statistics of all files."""
    verdict: Verdict


class TrainingSetPointer(Record):
    """training_set/latest.json: the set that was frozen last; written after everything it leads to."""

    hash: str
