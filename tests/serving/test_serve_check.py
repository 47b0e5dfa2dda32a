"""A server is asked on held-out prompts and compared with our decoder; every way in which it does not fit is named."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from dflash_core import cli
from dflash_core.decoding.decode import DecodedAnswer, DecodingOptions, generate_plain
from dflash_core.decoding.drafts import Draft, NgramDraft, NgramModel
from dflash_core.drafter.model import Drafter
from dflash_core.errors import IncompatibleError, ObjectMissing, StorageError, UserError
from dflash_core.evaluation import held_out as held_out_module
from dflash_core.evaluation.evaluate import evaluate_drafter
from dflash_core.export.export import export_drafter
from dflash_core.recipe import EvaluationSettings, ExportSettings, Recipe
from dflash_core.records import ServeCheck
from dflash_core.serving import serve_check as serve_check_module
from dflash_core.serving.serve_check import Question, serve_check
from dflash_core.serving.server import Server
from dflash_core.serving.vllm import vllm_server
from dflash_core.storage.s3 import Store
from dflash_core.target.cached import CachedTarget
from dflash_core.workspace import Workspace, connect
from tests.drafter.conftest import RUN, finished, make_recipe, target_folder
from tests.serving.fake_server import Fake, Listen, listen

__all__ = ["finished", "listen", "make_recipe", "target_folder"]
Finished = tuple[Recipe, Drafter]
Exported = tuple[Workspace, Drafter]


@pytest.fixture
def exported(finished: Finished) -> Exported:
    """An exported run with prompts held out."""
    recipe, drafter = finished
    recipe = recipe.model_copy(
        update={
            "training": recipe.training.model_copy(update={"held_out_share": 0.6}),
            "evaluation": EvaluationSettings(max_new_tokens=12),
            "export": ExportSettings(dtype="float32"),
        }
    )
    workspace = connect(recipe)
    export_drafter(workspace, RUN)
    return workspace, drafter


def nothing(*_: object) -> None:
    """No progress bar."""


def test_an_equal_server_is_equal_step_by_step(exported: Exported, listen: Listen, s3: Store) -> None:
    workspace, drafter = exported
    url = listen(Fake(workspace.recipe, drafter, tokenizer=lambda ids: ids).answer)
    seen: list[tuple[int, int]] = []
    check = serve_check(workspace, None, Question(url, plain_url=url, prompts=3), lambda *at: seen.append(at))
    assert check.agrees
    assert check.served_histogram == check.decoded_histogram
    assert sum(check.served_histogram) > 0
    assert (check.prompts, check.compared, check.differences, check.block_size) == (3, 6, (), 4)
    assert check.verdict.startswith("equal in every step")
    assert seen == [(done, 9) for done in range(1, 10)]
    assert s3.get_record(f"drafter_eval/{RUN}/serve_check.json", ServeCheck) == check


def test_our_target_is_loaded_after_the_server_that_we_started_has_freed_the_gpu(
    exported: Exported, listen: Listen, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    workspace, drafter = exported
    url, events = listen(Fake(workspace.recipe, drafter).answer), list[str]()
    load = held_out_module.load_cached_target

    @contextmanager
    def vllm(*_: object) -> Iterator[Server]:
        events.append("vLLM starts")
        yield Server(url)
        events.append("vLLM ends")

    def loaded(*arguments: Any) -> CachedTarget:
        events.append("our target is loaded")
        return load(*arguments)

    monkeypatch.setattr(serve_check_module, "vllm_server", vllm)
    monkeypatch.setattr(held_out_module, "load_cached_target", loaded)
    assert serve_check(workspace, None, Question(None, vllm_python=tmp_path, prompts=2), nothing).agrees
    assert events == ["vLLM starts", "vLLM ends", "our target is loaded"]


def test_fewer_proposals_than_trained_are_compared_as_served(exported: Exported, listen: Listen) -> None:
    workspace, drafter = exported
    check = serve_check(
        workspace, RUN, Question(listen(Fake(workspace.recipe, drafter, block_size=3).answer), prompts=3), nothing
    )
    assert (check.block_size, check.agrees) == (3, True)
    assert check.served_histogram == check.decoded_histogram


def test_impossible_acceptance_and_other_tokens_are_said(exported: Exported, listen: Listen) -> None:
    workspace, drafter = exported

    def verdict(fake: Fake) -> ServeCheck:
        return serve_check(workspace, RUN, Question(listen(fake.answer), prompts=3), nothing)

    high = verdict(Fake(workspace.recipe, drafter, accepts=3))
    assert not high.agrees
    assert "higher than it can be" in high.verdict
    other = verdict(Fake(workspace.recipe, drafter, third_token=7))
    assert other.agrees
    assert len(other.differences) == 3
    assert other.differences[0].startswith("prompt 0: served tokens differ from our decoder's from token 2 on, [7] ")
    assert "3 of 3 outputs differ" in other.verdict
    silent = verdict(Fake(workspace.recipe, drafter, token_ids=False))
    assert (silent.compared, silent.agrees) == (0, True)
    assert "returns no token ids" in silent.verdict


def make_ours_foresee(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let our decoder draft what the target will say, as a good drafter would; the server keeps the untrained one."""
    make = serve_check_module.generate

    def foreseeing(target: CachedTarget, draft: Draft, prompt: list[int], options: DecodingOptions) -> DecodedAnswer:
        text = np.array([*prompt, *generate_plain(target, prompt, options).tokens], np.int32)
        return make(target, NgramDraft(NgramModel(len(text), [text]), draft.block_size), prompt, options)

    monkeypatch.setattr(serve_check_module, "generate", foreseeing)


def test_a_server_that_accepts_less_is_lower(
    exported: Exported, listen: Listen, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace, drafter = exported
    make_ours_foresee(monkeypatch)
    low = serve_check(workspace, RUN, Question(listen(Fake(workspace.recipe, drafter).answer), prompts=3), nothing)
    assert low.served_acceptance_length < 2 < 3.5 < low.decoded_acceptance_length
    assert not low.agrees
    assert not low.differences
    assert low.verdict.startswith("lower than it should be: served acceptance length 1.")
    assert low.verdict.endswith("`dflash diagnose` names the cause")


def test_every_misfit_is_one_sentence(exported: Exported, listen: Listen) -> None:
    workspace, drafter = exported

    def ask(fake: Fake, model: str | None = None) -> None:
        serve_check(workspace, RUN, Question(listen(fake.answer), model=model, prompts=2), nothing)

    with pytest.raises(UserError, match=r"counts no speculative decoding .*--speculative-config"):
        ask(Fake(workspace.recipe, drafter, metrics=False))
    with pytest.raises(UserError, match=r"serves tiny, not gpt; name one of them with --model"):
        ask(Fake(workspace.recipe, drafter), model="gpt")
    with pytest.raises(UserError, match=r"serves tiny, small, not exactly one"):
        ask(Fake(workspace.recipe, drafter, names=("tiny", "small")))
    with pytest.raises(UserError, match=r"gave out \d+ tokens while we got \d+: somebody else uses it"):
        ask(Fake(workspace.recipe, drafter, foreign_tokens=5))
    with pytest.raises(IncompatibleError, match=r"tokenizes the first prompt as \[\d+.*as \[\d+"):
        ask(Fake(workspace.recipe, drafter, tokenizer=lambda ids: [id + 1 for id in ids]))
    wide = Fake(workspace.recipe, drafter)
    wide.block_size = 9
    with pytest.raises(IncompatibleError, match=rf"drafts 8 tokens, run {RUN} was trained for 3"):
        ask(wide)


def test_without_an_export_or_a_server_the_sentence_says_what_to_do(finished: Finished, tmp_path: Path) -> None:
    recipe, _ = finished
    training = recipe.training.model_copy(update={"held_out_share": 0.6})
    workspace = connect(recipe.model_copy(update={"training": training}))
    with pytest.raises(ObjectMissing, match=r"has not been exported whole; export it first \(dflash export\)"):
        serve_check(workspace, None, Question("http://127.0.0.1:9"), nothing)
    for question in (Question(None), Question("http://127.0.0.1:9", vllm_python=tmp_path)):
        with pytest.raises(UserError, match=r"give the address of a running server"):
            serve_check(workspace, None, question, nothing)
    started = vllm_server(tmp_path / "python", recipe.target.path, None, tmp_path / "log")
    with pytest.raises(UserError, match=r"does not exist; name the python of an environment with vLLM"), started:
        pass


def test_a_failure_while_the_server_is_asked_is_not_blamed_on_the_disk(
    exported: Exported, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError("no space left")

    workspace, _ = exported
    monkeypatch.setattr(serve_check_module, "open_held_out", full)
    with pytest.raises(OSError, match=r"^no space left$"):
        serve_check(workspace, None, Question("http://127.0.0.1:9"), nothing)
    monkeypatch.setattr(serve_check_module, "fetch_export", full)
    with pytest.raises(StorageError, match=r"cannot take the export: no space left; free disk space"):
        serve_check(workspace, None, Question("http://127.0.0.1:9"), nothing)


def test_another_target_or_tokenizer_is_refused_before_any_server_is_asked(exported: Exported, tmp_path: Path) -> None:
    workspace, _ = exported
    recipe = workspace.recipe
    other = tmp_path / "other"
    shutil.copytree(recipe.target.path, other)
    weights = other / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\7")
    (other / "tokenizer.json").write_text((other / "tokenizer.json").read_text().replace("w95", "w95x"))
    rules = recipe.tokenization.model_copy(update={"tokenizer": recipe.target.path})
    moved = recipe.target.model_copy(update={"path": other})
    elsewhere = recipe.model_copy(update={"target": moved, "tokenization": rules})
    renamed = recipe.tokenization.model_copy(update={"tokenizer": other})
    for changed, message in (
        (elsewhere, r"was trained with target \w{12}, .*other is \w{12}"),
        (recipe.model_copy(update={"tokenization": renamed}), r"tokenizer\.json of sha256 \w{12}, .*other has \w{12}"),
    ):
        with pytest.raises(IncompatibleError, match=message):
            serve_check(connect(changed), RUN, Question("http://127.0.0.1:9"), nothing)
        with pytest.raises(IncompatibleError, match=message):
            evaluate_drafter(connect(changed), RUN, nothing)


def test_the_command_prints_both_sides_and_fails_where_serving_is_lower(
    exported: Exported, listen: Listen, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    workspace, drafter = exported
    monkeypatch.setattr(cli.drafter, "open_recipe", lambda path: workspace)
    result = tmp_path / "result.json"
    good = [
        "serve-check",
        "--url",
        listen(Fake(workspace.recipe, drafter).answer),
        "--prompts",
        "2",
        "--result",
        str(result),
    ]
    answer = CliRunner().invoke(cli.app, good)
    assert answer.exit_code == 0, answer.output
    assert "equal in every step" in answer.output
    assert "served" in answer.output
    assert ServeCheck.model_validate_json(result.read_text()).agrees
    make_ours_foresee(monkeypatch)
    low = listen(Fake(workspace.recipe, drafter).answer)
    assert CliRunner().invoke(cli.app, ["serve-check", "--url", low, "--prompts", "2"]).exit_code == 1
