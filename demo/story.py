"""`make demo`: the whole story on eight files, through a real Dagster, ending in .dflash/demo/report.json.

sample -> upload -> partitions -> backfill -> gate fails -> generate one file again -> rerun one partition ->
gate passes -> train -> evaluate -> export. A second run redoes nothing that is still valid: what the gate said the
first time is read from the training set that was frozen then.
"""

import argparse
import hashlib
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from demo.files import BAD_FILE, completion_files, prompts_of_bad_file, spoil
from demo.narrator import Move, Narrator, StepWatch
from demo.report import DemoReport
from demo.serve import serving
from dflash_assets.dev import dagster_ui, local_instance
from dflash_assets.graphql import Dagster, RunEnd
from dflash_assets.partitions import sync_partitions
from dflash_core.drafter.runs import find_checkpoint
from dflash_core.errors import UserError
from dflash_core.generation.generate import find_generated, list_prompts
from dflash_core.records import DrafterCheckpoint, DrafterEval, GeneratedFile, Record, TrainingSet
from dflash_core.storage.layout import RunKeys, TrainingSetKeys
from dflash_core.storage.s3 import Store
from dflash_core.tokenization.tokenizer import fingerprint
from dflash_core.training_set.freeze import load_training_set
from dflash_core.workspace import Workspace, open_workspace

RECIPE = Path("recipes/demo.toml")
FOLDER = Path(".dflash/demo")
FILE_ASSETS = ("raw_completions", "tokenized_shards", "loss_mask_stats")
STEP_TIMEOUT_S = 600.0


class FirstGate(Record):
    """The training set that the gate refused, remembered for the next run."""

    training_set: str
    spoiled_sha256: str
    fingerprint: str
    thresholds: str


@dataclass
class Story:
    """The steps, in order, and what later ones need of earlier ones."""

    workspace: Workspace
    ui: Dagster
    files: dict[str, Path] = field(default_factory=dict)
    partitions: list[str] = field(default_factory=list)
    gates: list[TrainingSet] = field(default_factory=list)
    repair_s: float = 0.0

    @property
    def first_gate(self) -> FirstGate | None:
        """The refusal of an earlier run of this demo, if its training set is still in the store."""
        try:
            gate = FirstGate.model_validate_json((FOLDER / "first_gate.json").read_bytes())
        except (OSError, ValueError):
            return None
        still_there = self.workspace.derived.find_record(TrainingSetKeys(gate.training_set).manifest, TrainingSet)
        return gate if still_there is not None and gate == self._remember(gate.training_set) else None

    def sample(self, move: Move) -> str:
        """Completions of the target's own."""
        self.files = completion_files(self.workspace.recipe.target.path, FOLDER / "completions", move)
        return f"{len(self.files)} files of completions, sampled from {self.workspace.recipe.target.path}"

    def upload(self, move: Move) -> str:
        """Every file into the store, the bad one spoiled, unless an earlier run has repaired it."""
        sent = 0
        for done, (name, path) in enumerate(self.files.items(), 1):
            body = path.read_bytes()
            if name != BAD_FILE:
                sent += _put(self.workspace.source, name, body)
            elif self.first_gate is None or self._regenerated() is None:
                sent += _put(self.workspace.source, name, spoil(body))
            move(done, len(self.files))
        return f"{sent} of {len(self.files)} files to {self.workspace.source.uri('')}, the others are there already"

    def sync(self, move: Move) -> str:
        """Every file a partition."""
        synced = sync_partitions(local_instance(), self.workspace)
        self.partitions = [source.partition for source in synced.sources]
        return f"{len(self.partitions)} partitions, {len(synced.added)} of them new"

    def backfill(self, move: Move) -> str:
        """All partitions through Dagster's backfill daemon."""
        backfill = self.ui.backfill(FILE_ASSETS, self.partitions)
        runs = self.ui.wait_for_backfill(backfill, STEP_TIMEOUT_S, lambda: self._count(move))
        _all_succeeded(runs)
        return f"{len(self.partitions)} partitions of {', '.join(FILE_ASSETS)} in {len(runs)} run(s), {backfill}"

    def refuse(self, move: Move) -> str:
        """The gate fails and names the bad file; in a later run: what it said then."""
        earlier = self.first_gate
        frozen = self._freeze() if earlier is None else load_training_set(self.workspace.derived, earlier.training_set)
        self.gates.append(frozen)
        named = [one for one in frozen.verdict.reasons if one.startswith(f"{BAD_FILE}:") and "spike" in one]
        if frozen.verdict.passed or not named:
            raise UserError(f"the gate should refuse {BAD_FILE} for its spike, but said: {frozen.verdict}")
        (FOLDER / "first_gate.json").write_text(self._remember(frozen.hash).model_dump_json())
        return f"{'FAILS' if earlier is None else 'failed in an earlier run'}: {named[0]}"

    def repair(self, move: Move) -> str:
        """The bad file's prompts, answered again by the target behind a server of its own."""
        began = time.monotonic()
        assert self.workspace.prompts is not None
        _put(self.workspace.prompts, BAD_FILE, prompts_of_bad_file())
        earlier = self._regenerated()
        if earlier is None:
            with serving(self.workspace.recipe.target.path, FOLDER / "serve.log") as url:
                config = {"ops": {"generated_completions": {"config": {"servers": [url]}}}}
                run = self.ui.materialize(["generated_completions"], partition=BAD_FILE, config=config)
                _all_succeeded([self.ui.wait_for_run(run, STEP_TIMEOUT_S)])
        self.repair_s = time.monotonic() - began
        made = self._regenerated()
        if made is None:
            raise UserError(f"{BAD_FILE} should be generated by now, but its manifest is not valid")
        told = f"{made.written} of {made.lines} prompts answered, {made.completion_tokens:,} tokens"
        return f"{BAD_FILE} {'generated again' if earlier is None else 'was generated in an earlier run'}: {told}"

    def rerun(self, move: Move) -> str:
        """Only the repaired partition, as one run."""
        run = self.ui.materialize(FILE_ASSETS, partition=BAD_FILE)
        _all_succeeded([self.ui.wait_for_run(run, STEP_TIMEOUT_S)])
        return f"partition {BAD_FILE} alone, run {run[:8]}"

    def accept(self, move: Move) -> str:
        """The gate passes."""
        frozen = self._freeze()
        self.gates.append(frozen)
        if not frozen.verdict.passed:
            raise UserError(f"the gate should pass now, but: {'; '.join(frozen.verdict.reasons)}")
        rows = f"{frozen.rows_kept:,} rows of {len(frozen.shards)} files"
        return f"passes: {rows}, {frozen.supervised_tokens:,} supervised tokens"

    def train(self, move: Move) -> str:
        """The drafter, online, behind the gpu pool."""
        steps = StepWatch(self.workspace.work_dir, move)
        run = self.ui.materialize(["drafter_checkpoint"])
        _all_succeeded([self.ui.wait_for_run(run, STEP_TIMEOUT_S, lambda status: steps.look())])
        checkpoint = self.checkpoint()
        return f"{checkpoint.steps} steps in {checkpoint.train_s:.0f} s, run {checkpoint.run}"

    def evaluate(self, move: Move) -> str:
        """Draft and verify on held-out prompts."""
        _all_succeeded([self.ui.wait_for_run(self.ui.materialize(["drafter_eval"]), STEP_TIMEOUT_S)])
        report = self.evaluation()
        return (
            f"acceptance length {report.acceptance_length:.2f} on {report.prompts} held-out prompts "
            f"(3-gram {report.acceptance_length_ngram:.2f}, no features {report.acceptance_length_no_features:.2f}), "
            f"{'lossless' if report.lossless else 'NOT LOSSLESS'}"
        )

    def export(self, move: Move) -> str:
        """The folder that serving engines load."""
        _all_succeeded([self.ui.wait_for_run(self.ui.materialize(["drafter_export"]), STEP_TIMEOUT_S)])
        return f"config.json and model.safetensors in {self.workspace.recipe.export.local_dir} and S3"

    def checkpoint(self) -> DrafterCheckpoint:
        """Of the latest training run."""
        return find_checkpoint(self.workspace.derived, None)

    def evaluation(self) -> DrafterEval:
        """Of the latest training run."""
        return self.workspace.derived.get_record(RunKeys(self.checkpoint().run).report, DrafterEval)

    def report(self, wall_s: float) -> DemoReport:
        """Everything that was promised, in numbers."""
        counts = [self.ui.partitions(asset) for asset in FILE_ASSETS]
        checkpoint, evaluation, (first, second) = self.checkpoint(), self.evaluation(), self.gates
        regenerated = self._regenerated()
        return DemoReport(
            acceptance_length=evaluation.acceptance_length,
            acceptance_length_3gram=evaluation.acceptance_length_ngram,
            acceptance_length_no_features=evaluation.acceptance_length_no_features,
            lossless=evaluation.lossless,
            prompts=evaluation.prompts,
            wall_s=round(wall_s, 1),
            train_s=round(checkpoint.train_s, 1),
            repair_s=round(self.repair_s, 1),
            rows_generated=0 if regenerated is None else regenerated.written,
            rows_in=second.rows_read,
            rows_kept=second.rows_kept,
            rows_dropped=second.rows_dropped or 0,
            rows_rejected=second.rows_rejected,
            partitions_ok=min(materialized for _, materialized, _ in counts),
            partitions_failed=max(failed for _, _, failed in counts),
            gate_first="pass" if first.verdict.passed else "fail",
            gate_second="pass" if second.verdict.passed else "fail",
            ui_url=self.ui.url,
        )

    def _freeze(self) -> TrainingSet:
        _all_succeeded([self.ui.wait_for_run(self.ui.materialize(["training_set"]), STEP_TIMEOUT_S)])
        return load_training_set(self.workspace.derived)

    def _regenerated(self) -> GeneratedFile | None:
        """The manifest of the bad file's new completions, if they are there and valid."""
        prompts = {source.partition: source for source in list_prompts(self.workspace)}
        return find_generated(self.workspace, prompts[BAD_FILE]) if BAD_FILE in prompts else None

    def _remember(self, training_set: str) -> FirstGate:
        """What that training set was refused for, as things stand now."""
        return FirstGate(
            training_set=training_set,
            spoiled_sha256=hashlib.sha256(spoil(self.files[BAD_FILE].read_bytes())).hexdigest(),
            fingerprint=fingerprint(self.workspace.recipe),
            thresholds=self.workspace.recipe.gate.model_dump_json(),
        )

    def _count(self, move: Move) -> None:
        every, materialized, failed = self.ui.partitions(FILE_ASSETS[-1])
        move(materialized + failed, every)


def _put(store: Store, name: str, body: bytes) -> int:
    """1 if the object had to be written."""
    etag = hashlib.md5(body, usedforsecurity=False).hexdigest()
    if (f"{name}.jsonl", len(body), etag) in set(store.list(name)):
        return 0
    store.put(f"{name}.jsonl", body, "application/jsonl")
    return 1


def _all_succeeded(runs: list[RunEnd]) -> None:
    for run in runs:
        if not run.succeeded:
            raise UserError(f"run {run.run} failed: {run.reason}")


def tell(keep_ui: bool) -> int:
    """Tell the story; 0 only if all of it held."""
    console = Console()
    began = time.monotonic()
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (
        open_workspace(RECIPE) as workspace,
        dagster_ui(RECIPE, 3000, workspace.access, FOLDER / "dagster.log") as ui,
    ):
        story = Story(workspace, ui)
        steps = [story.sample, story.upload, story.sync, story.backfill, story.refuse, story.repair, story.rerun]
        steps += [story.accept, story.train, story.evaluate, story.export]
        names = ["sample", "upload", "partitions", "backfill", "gate", "repair", "rerun"]
        names += ["gate", "train", "evaluate", "export"]
        narrator = Narrator(console, len(steps))
        ui.wait_until_loaded()
        for name, step in zip(names, steps, strict=True):
            narrator.tell(name, step)
        report = story.report(time.monotonic() - began)
        (FOLDER / "report.json").write_text(report.model_dump_json(indent=1) + "\n")
        broken = report.broken_promises()
        for sentence in broken:
            console.print(f"not as promised: {sentence}", style="red", markup=False)
        for sentence in report.missed_times():
            console.print(f"slower than two idle cores: {sentence}", style="yellow", markup=False)
        console.print(f"{report.wall_s:.0f} s in all; numbers in {FOLDER / 'report.json'}; UI: {ui.url}")
        if keep_ui:
            console.print("the UI stays up until Ctrl-C")
            _until_interrupted()
    return 1 if broken else 0


def _until_interrupted() -> None:
    try:
        while True:
            time.sleep(3600)
    except KeyboardInterrupt:
        return


def main() -> int:
    """Entry point of `make demo`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--no-ui", action="store_true", help="exit when the story is told, also at a terminal")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        return tell(keep_ui=sys.stdin.isatty() and not arguments.no_ui)
    except KeyboardInterrupt:
        return 130
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"error: {error}; check disk space and permissions of {FOLDER.absolute()}", file=sys.stderr)
        return UserError.exit_code


if __name__ == "__main__":
    sys.exit(main())
