"""The world that the browser walks through: twelve files of word problems, three of them bad, and the demo's target."""

import json
import shutil
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from dataclasses import dataclass
from pathlib import Path

from demo.word_problems import WordProblem, word_problems
from dflash_assets.dev import dagster_ui, local_instance
from dflash_assets.graphql import Dagster
from dflash_assets.partitions import sync_partitions
from dflash_core.workspace import Workspace, open_workspace

REPOSITORY = Path(__file__).resolve().parents[2]
FILES, ROWS = 12, 60
BAD = {
    "part-03": b"\x1f\x8b this was to be gzip",
    "part-07": b'{"prompt": "How many apples?", "completion": "", "finish_reason": "stop"}\n' * 40,
    "part-10": b"<html>502 Bad Gateway</html>\n",
}
RECIPE = """
name = "walk"
[source]
bucket = "walk"
prefix = "completions/"
[storage]
bucket = "walk"
prefix = "derived/"
embedded_store = ".dflash/store"
[target]
path = "demo/target"
layers = 3
dtype = "float32"
[tokenization]
max_length = 512
workers = 1
[drafter]
block_size = 8
num_layers = 2
[training]
epochs = 20
batch_rows = 2
anchors = 16
learning_rate = 2e-3
held_out_share = 0.05
validate_every_steps = 100
checkpoint_every_steps = 100
"""


@dataclass(frozen=True)
class World:
    """A project folder with a running UI."""

    folder: Path
    workspace: Workspace
    ui: Dagster

    def put(self, partition: str, body: bytes) -> None:
        """Make this the partition's source file."""
        self.workspace.source.put(f"{partition}.jsonl", body)

    def repair(self) -> None:
        """Good completions in place of the bad files."""
        for partition in BAD:
            self.put(partition, good_file(partition))


@contextmanager
def walking(folder: Path, port: int = 0) -> Iterator[World]:
    """What a user has after cloning and copying a recipe, with the UI running; no file has been looked at yet."""
    for name in ("dagster.yaml", "workspace.yaml"):
        shutil.copy(REPOSITORY / name, folder / name)
    shutil.copytree(REPOSITORY / "demo", folder / "demo")
    (folder / "walk.toml").write_text(RECIPE)
    recipe = Path("walk.toml")
    with chdir(folder), open_workspace(recipe) as workspace:
        for partition in partitions():
            workspace.source.put(f"{partition}.jsonl", BAD.get(partition) or good_file(partition))
        sync_partitions(local_instance(), workspace)
        with dagster_ui(recipe, port, workspace.access, folder / "dagster.log") as ui:
            ui.wait_until_loaded()
            yield World(folder, workspace, ui)


def partitions() -> list[str]:
    """All partition keys, in order."""
    return [f"part-{number:02d}" for number in range(FILES)]


def good_file(partition: str) -> bytes:
    """Sixty completions, different ones for every partition."""
    number = partitions().index(partition)
    problems = list(word_problems(FILES * ROWS, 0, "train"))[number * ROWS : (number + 1) * ROWS]
    return "".join(json.dumps(_completion(problem)) + "\n" for problem in problems).encode()


def _completion(problem: WordProblem) -> dict[str, object]:
    answer = {"role": "assistant", "reasoning_content": problem.reasoning, "content": problem.answer}
    messages = [{"role": "user", "content": problem.question}, answer]
    return {"id": problem.id, "messages": messages, "finish_reason": "stop"}
