"""Every key of every object below the storage prefix. Nothing else spells one.

generated_completions/<partition>/          manifest.json rejects.jsonl <request hash>/<segment>.jsonl
tokenized_shards/<fingerprint>/             <partition>.arrow <partition>.rejects.jsonl <partition>.json (manifest)
loss_mask_stats/<fingerprint>/              <partition>.json
training_set/                               latest.json <hash>.json <hash>.statistics.json <hash>.html <hash>.png
drafter_checkpoint/                         latest.json
drafter_checkpoint/<run>/                   manifest.json recipe.json config.json model.safetensors metrics.jsonl
                                            learning_curve.png checkpoints/<step>.json checkpoints/<step>/...
drafter_eval/                               latest-<target>.json
drafter_eval/<run>/                         report.json report.md acceptance.png serve_check.json
drafter_export/<run>/                       manifest.json and the folder's files
"""

from dataclasses import dataclass

TRAINING_SETS = "training_set/"
LATEST_TRAINING_SET = "training_set/latest.json"
RUNS = "drafter_checkpoint/"
LATEST_RUN = "drafter_checkpoint/latest.json"
"""Names the run that was finished last."""

MANIFEST_FILE = "manifest.json"
METRICS_FILE = "metrics.jsonl"
CURVE_FILE = "learning_curve.png"
CONFIG_FILE, WEIGHTS_FILE = "config.json", "model.safetensors"


@dataclass(frozen=True)
class GeneratedKeys:
    """What a file of prompts became."""

    partition: str

    @property
    def manifest(self) -> str:
        """A `GeneratedFile`, written last."""
        return f"generated_completions/{self.partition}/{MANIFEST_FILE}"

    @property
    def rejects(self) -> str:
        """JSON lines of `Reject`."""
        return f"generated_completions/{self.partition}/rejects.jsonl"

    def ledger(self, request_hash: str) -> str:
        """The folder of the ledger's segments."""
        return f"generated_completions/{self.partition}/{request_hash}/"


@dataclass(frozen=True)
class ShardKeys:
    """What a source file became under one tokenization fingerprint."""

    fingerprint: str
    partition: str

    @property
    def shard(self) -> str:
        """The Arrow file."""
        return f"{shards_folder(self.fingerprint)}{self.partition}.arrow"

    @property
    def rejects(self) -> str:
        """JSON lines of `Reject`."""
        return f"{shards_folder(self.fingerprint)}{self.partition}.rejects.jsonl"

    @property
    def statistics(self) -> str:
        """A `FileStatistics`."""
        return f"{statistics_folder(self.fingerprint)}{self.partition}.json"

    @property
    def manifest(self) -> str:
        """A `ShardManifest`, written last."""
        return f"{shards_folder(self.fingerprint)}{self.partition}.json"


def shards_folder(fingerprint: str) -> str:
    """Shards, rejects and manifests of all files."""
    return f"tokenized_shards/{fingerprint}/"


def statistics_folder(fingerprint: str) -> str:
    """Statistics of all files."""
    return f"loss_mask_stats/{fingerprint}/"


@dataclass(frozen=True)
class TrainingSetKeys:
    """A frozen training set."""

    hash: str

    @property
    def manifest(self) -> str:
        """A `TrainingSet`, written last."""
        return f"{TRAINING_SETS}{self.hash}.json"

    @property
    def statistics(self) -> str:
        """A `MergedStatistics`."""
        return f"{TRAINING_SETS}{self.hash}.statistics.json"

    @property
    def report(self) -> str:
        """The page for people."""
        return f"{TRAINING_SETS}{self.hash}.html"

    @property
    def picture(self) -> str:
        """All files in one picture."""
        return f"{TRAINING_SETS}{self.hash}.png"


@dataclass(frozen=True)
class RunKeys:
    """A training run: its checkpoints, what it published, its evaluation, its export."""

    run: str

    @property
    def folder(self) -> str:
        """Everything that training writes."""
        return f"{RUNS}{self.run}/"

    @property
    def manifest(self) -> str:
        """A `DrafterCheckpoint`, written last."""
        return self.folder + MANIFEST_FILE

    @property
    def settings(self) -> str:
        """The recipe as it was, without secrets."""
        return self.folder + "recipe.json"

    @property
    def config(self) -> str:
        """The drafter's config.json."""
        return self.folder + CONFIG_FILE

    @property
    def weights(self) -> str:
        """fp32 masters."""
        return self.folder + WEIGHTS_FILE

    @property
    def metrics(self) -> str:
        """JSON lines, one a step."""
        return self.folder + METRICS_FILE

    @property
    def curve(self) -> str:
        """The learning curve, PNG."""
        return self.folder + CURVE_FILE

    @property
    def checkpoints(self) -> str:
        """The folder of what can be resumed from."""
        return self.folder + "checkpoints/"

    def saved_step(self, step: int) -> str:
        """A `SavedStep`, written after its files."""
        return f"{self.checkpoints}{step:08d}.json"

    def checkpoint_file(self, step: int, name: str) -> str:
        """One file of a checkpoint."""
        return f"{self.checkpoints}{step:08d}/{name}"

    @property
    def report(self) -> str:
        """A `DrafterEval`, written after its picture and its Markdown."""
        return f"drafter_eval/{self.run}/report.json"

    @property
    def report_picture(self) -> str:
        """Acceptance, PNG."""
        return f"drafter_eval/{self.run}/acceptance.png"

    @property
    def report_markdown(self) -> str:
        """The report for people."""
        return f"drafter_eval/{self.run}/report.md"

    @property
    def serve_check(self) -> str:
        """A `ServeCheck`."""
        return f"drafter_eval/{self.run}/serve_check.json"

    @property
    def export_folder(self) -> str:
        """The drafter as serving engines load it."""
        return f"drafter_export/{self.run}/"

    @property
    def export_manifest(self) -> str:
        """A `DrafterExport`, deleted before a file changes and written last."""
        return self.export_folder + MANIFEST_FILE


def latest_evaluation(target_fingerprint: str) -> str:
    """Names the run that was evaluated last for a target."""
    return f"drafter_eval/latest-{target_fingerprint[:12]}.json"
