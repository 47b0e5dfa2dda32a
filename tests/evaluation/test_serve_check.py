"""A server is asked on held-out prompts and compared with our decoder; every way in which it does not fit is named."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from dflash_core import cli
from dflash_core.drafter.export import export_drafter
from dflash_core.drafter.model import Drafter
from dflash_core.errors import IncompatibleError, ObjectMissing, StorageError, UserError
from dflash_core.evaluation import serve_check as serve_check_module
from dflash_core.evaluation import subject as subject_module
from dflash_core.evaluation.acceptance import acceptance_length
from dflash_core.evaluation.decode import Generation, Sampling, generate_plain
from dflash_core.evaluation.drafts import Draft, NgramDraft
from dflash_core.evaluation.evaluate import evaluate_drafter
from dflash_core.evaluation.ngram import NgramModel
from dflash_core.evaluation.serve_check import Question, serve_check
from dflash_core.evaluation.served import Counters, Server
from dflash_core.evaluation.target import VerifyingTarget
from dflash_core.evaluation.vllm_server import speculative_config, vllm_server
from dflash_core.recipe import Evaluation, Export, Recipe
from dflash_core.records import ServeCheck
from dflash_core.storage.store import Store
from tests.drafter.conftest import RUN, finished
from tests.evaluation.fake_server import Fake, Listen, listen

__all__ = ["finished", "listen"]
Finished = tuple[Recipe, Drafter]


@pytest.fixture
def exported(finished: Finished) -> Finished:
    """An exported run with prompts held out."""
    recipe, drafter = finished
    recipe = recipe.model_copy(
        update={
            "training": recipe.training.model_copy(update={"held_out_share": 0.6}),
            "evaluation": Evaluation(max_new_tokens=12),
            "export": Export(dtype="float32"),
        }
    )
    export_drafter(recipe, RUN)
    return recipe, drafter


def nothing(*_: object) -> None:
    """No progress bar."""


def test_an_equal_server_is_equal_step_by_step(exported: Finished, listen: Listen, s3: Store) -> None:
    recipe, drafter = exported
    url = listen(Fake(recipe, drafter, tokenizer=lambda ids: ids).answer)
    seen: list[tuple[int, int]] = []
    check = serve_check(recipe, None, Question(url, plain_url=url, prompts=3), lambda *at: seen.append(at))
    assert check.agrees
    assert check.served_histogram == check.decoded_histogram
    assert sum(check.served_histogram) > 0
    assert (check.prompts, check.compared, check.differences, check.block_size) == (3, 6, (), 4)
    assert check.verdict.startswith("equal in every step")
    assert seen == [(done, 9) for done in range(1, 10)]
    assert s3.get_record(f"drafter_eval/{RUN}/serve_check.json", ServeCheck) == check


def test_our_target_is_loaded_after_the_server_that_we_started_has_freed_the_gpu(
    exported: Finished, listen: Listen, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    recipe, drafter = exported
    url, events = listen(Fake(recipe, drafter).answer), list[str]()
    load = subject_module.load_verifying_target

    @contextmanager
    def vllm(*_: object) -> Iterator[Server]:
        events.append("vLLM starts")
        yield Server(url)
        events.append("vLLM ends")

    def loaded(*arguments: Any) -> VerifyingTarget:
        events.append("our target is loaded")
        return load(*arguments)

    monkeypatch.setattr(serve_check_module, "vllm_server", vllm)
    monkeypatch.setattr(subject_module, "load_verifying_target", loaded)
    assert serve_check(recipe, None, Question(None, vllm_python=tmp_path, prompts=2), nothing).agrees
    assert events == ["vLLM starts", "vLLM ends", "our target is loaded"]


def test_fewer_proposals_than_trained_are_compared_as_served(exported: Finished, listen: Listen) -> None:
    recipe, drafter = exported
    check = serve_check(recipe, RUN, Question(listen(Fake(recipe, drafter, block_size=3).answer), prompts=3), nothing)
    assert (check.block_size, check.agrees) == (3, True)
    assert check.served_histogram == check.decoded_histogram


def test_impossible_acceptance_and_other_tokens_are_said(exported: Finished, listen: Listen) -> None:
    recipe, drafter = exported

    def verdict(fake: Fake) -> ServeCheck:
        return serve_check(recipe, RUN, Question(listen(fake.answer), prompts=3), nothing)

    high = verdict(Fake(recipe, drafter, accepts=3))
    assert not high.agrees
    assert "higher than it can be" in high.verdict
    other = verdict(Fake(recipe, drafter, third_token=7))
    assert other.agrees
    assert len(other.differences) == 3
    assert other.differences[0].startswith("prompt 0: served tokens differ from our decoder's from token 2 on, [7] ")
    assert "3 of 3 outputs differ" in other.verdict
    silent = verdict(Fake(recipe, drafter, token_ids=False))
    assert (silent.compared, silent.agrees) == (0, True)
    assert "returns no token ids" in silent.verdict


def make_ours_foresee(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let our decoder draft what the target will say, as a good drafter would; the server keeps the untrained one."""
    make = serve_check_module.generate

    def foreseeing(target: VerifyingTarget, draft: Draft, prompt: list[int], sampling: Sampling) -> Generation:
        text = np.array([*prompt, *generate_plain(target, prompt, sampling).tokens], np.int32)
        return make(target, NgramDraft(NgramModel(len(text), [text]), draft.block_size), prompt, sampling)

    monkeypatch.setattr(serve_check_module, "generate", foreseeing)


def test_a_server_that_accepts_less_is_lower(
    exported: Finished, listen: Listen, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, drafter = exported
    make_ours_foresee(monkeypatch)
    low = serve_check(recipe, RUN, Question(listen(Fake(recipe, drafter).answer), prompts=3), nothing)
    assert low.served_acceptance_length < 2 < 3.5 < low.decoded_acceptance_length
    assert not low.agrees
    assert not low.differences
    assert low.verdict.startswith("lower than it should be: served acceptance length 1.")
    assert low.verdict.endswith("`dflash diagnose` names the cause")


def test_every_misfit_is_one_sentence(exported: Finished, listen: Listen) -> None:
    recipe, drafter = exported

    def ask(fake: Fake, model: str | None = None) -> None:
        serve_check(recipe, RUN, Question(listen(fake.answer), model=model, prompts=2), nothing)

    with pytest.raises(UserError, match=r"counts no speculative decoding .*--speculative-config"):
        ask(Fake(recipe, drafter, metrics=False))
    with pytest.raises(UserError, match=r"serves tiny, not gpt; name one of them with --model"):
        ask(Fake(recipe, drafter), model="gpt")
    with pytest.raises(UserError, match=r"serves tiny, small, not exactly one"):
        ask(Fake(recipe, drafter, names=("tiny", "small")))
    with pytest.raises(UserError, match=r"gave out \d+ tokens while we got \d+: somebody else uses it"):
        ask(Fake(recipe, drafter, foreign_tokens=5))
    with pytest.raises(IncompatibleError, match=r"tokenizes the first prompt as \[\d+.*as \[\d+"):
        ask(Fake(recipe, drafter, tokenizer=lambda ids: [id + 1 for id in ids]))
    wide = Fake(recipe, drafter)
    wide.block_size = 9
    with pytest.raises(IncompatibleError, match=rf"drafts 8 tokens, run {RUN} was trained for 3"):
        ask(wide)


def test_addresses_that_are_no_server_are_one_sentence(listen: Listen) -> None:
    for url in ("file:///etc/passwd", "127.0.0.1:8000", "http://169.254.169.254/latest"):
        with pytest.raises(UserError, match=r"the address of the server.* (must be an http|link-local|metadata)"):
            Server(url)
    with pytest.raises(UserError, match=r"does not answer .*is the server up"):
        Server("http://127.0.0.1:9").model(None)
    with pytest.raises(UserError, match=r"answers 404: no such page"):
        Server(listen(lambda path, body: (404, "no such page"))).model(None)
    with pytest.raises(UserError, match=r"answers no JSON object; is this an OpenAI-compatible server"):
        Server(listen(lambda path, body: (200, "<html>"))).model(None)
    secret = listen(lambda path, body: (200, '{"data": [{"id": "secret"}]}'))
    with pytest.raises(UserError, match=r"answers 302"):
        Server(listen(lambda path, body: (302, secret + path))).model(None)
    assert Server(secret + "/v1/").model(None) == "secret"


def test_counters_become_the_histogram_of_our_decoder() -> None:
    steps = [0, 3, 1, 1, 2, 3]
    counters = Counters(6, sum(steps), tuple(sum(s > k for s in steps) for k in range(3)), 16)
    assert counters.histogram == (1, 2, 1, 2)
    assert acceptance_length(counters.histogram) == 1 + counters.accepted / counters.drafts
    assert counters.since(counters).histogram == (0, 0, 0, 0)


def test_without_an_export_or_a_server_the_sentence_says_what_to_do(finished: Finished, tmp_path: Path) -> None:
    recipe, _ = finished
    recipe = recipe.model_copy(update={"training": recipe.training.model_copy(update={"held_out_share": 0.6})})
    with pytest.raises(ObjectMissing, match=r"has not been exported whole; export it first \(dflash export\)"):
        serve_check(recipe, None, Question("http://127.0.0.1:9"), nothing)
    for question in (Question(None), Question("http://127.0.0.1:9", vllm_python=tmp_path)):
        with pytest.raises(UserError, match=r"give the address of a running server"):
            serve_check(recipe, None, question, nothing)
    started = vllm_server(tmp_path / "python", recipe.target.path, None, tmp_path / "log")
    with pytest.raises(UserError, match=r"does not exist; name the python of an environment with vLLM"), started:
        pass


def test_a_failure_while_the_server_is_asked_is_not_blamed_on_the_disk(
    exported: Finished, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError("no space left")

    recipe, _ = exported
    monkeypatch.setattr(serve_check_module, "open_held_out", full)
    with pytest.raises(OSError, match=r"^no space left$"):
        serve_check(recipe, None, Question("http://127.0.0.1:9"), nothing)
    monkeypatch.setattr(serve_check_module, "fetch_export", full)
    with pytest.raises(StorageError, match=r"cannot take the export: no space left; free disk space"):
        serve_check(recipe, None, Question("http://127.0.0.1:9"), nothing)


def test_another_target_or_tokenizer_is_refused_before_any_server_is_asked(exported: Finished, tmp_path: Path) -> None:
    recipe, _ = exported
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
            serve_check(changed, RUN, Question("http://127.0.0.1:9"), nothing)
        with pytest.raises(IncompatibleError, match=message):
            evaluate_drafter(changed, RUN, nothing)


def test_vllm_is_told_one_proposal_less_than_the_block(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"block_size": 16}')
    for asked, told in ((None, 15), (7, 7)):
        assert speculative_config(tmp_path, asked) == {
            "method": "dflash",
            "model": str(tmp_path),
            "num_speculative_tokens": told,
        }


@pytest.mark.parametrize("form", ["published", "speculators"])
@pytest.mark.parametrize(("kinds", "told"), [("FF", ""), ("SS", ""), ("SF", "1")])
def test_vllm_is_told_of_drafters_that_mix_sliding_and_full_layers(
    tmp_path: Path, form: str, kinds: str, told: str
) -> None:
    layers = {"layer_types": [{"F": "full_attention", "S": "sliding_attention"}[kind] for kind in kinds]}
    table = layers if form == "published" else {"transformer_layer_config": layers}
    (tmp_path / "config.json").write_text(json.dumps(table | {"block_size": 4}))
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "runner=$VLLM_USE_V2_MODEL_RUNNER."\nexit 1\n')
    python.chmod(0o755)
    started = vllm_server(python, tmp_path, tmp_path, tmp_path / "log")
    with pytest.raises(UserError, match=rf"does not serve .*runner={told}\."), started:
        pass


def test_the_command_prints_both_sides_and_fails_where_serving_is_lower(
    exported: Finished, listen: Listen, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    recipe, drafter = exported
    monkeypatch.setattr(cli.drafter, "open_recipe", lambda path: recipe)
    result = tmp_path / "result.json"
    good = ["serve-check", "--url", listen(Fake(recipe, drafter).answer), "--prompts", "2", "--result", str(result)]
    answer = CliRunner().invoke(cli.app, good)
    assert answer.exit_code == 0, answer.output
    assert "equal in every step" in answer.output
    assert "served" in answer.output
    assert ServeCheck.model_validate_json(result.read_text()).agrees
    make_ours_foresee(monkeypatch)
    low = listen(Fake(recipe, drafter).answer)
    assert CliRunner().invoke(cli.app, ["serve-check", "--url", low, "--prompts", "2"]).exit_code == 1
