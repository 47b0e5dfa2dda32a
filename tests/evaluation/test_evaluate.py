"""A trained run is evaluated on held-out prompts, once, and exported; what does not fit is refused with both values."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load

from dflash_core.batches.order import is_held_out
from dflash_core.cli import terminal
from dflash_core.decoding.decode import DecodedAnswer, DecodingOptions, generate
from dflash_core.decoding.drafts import Draft
from dflash_core.decoding.prompts import HeldOutPrompt, ThinkingSwitch
from dflash_core.drafter.folder import load_drafter
from dflash_core.errors import IncompatibleError, ObjectMissing, UserError
from dflash_core.evaluation import evaluate as module
from dflash_core.evaluation import measure
from dflash_core.evaluation.evaluate import evaluate_drafter
from dflash_core.export.export import export_drafter
from dflash_core.recipe import EvaluationSettings, ExportSettings, Recipe
from dflash_core.records import LEAST_PROMPTS, DrafterEval, DrafterExport
from dflash_core.storage.s3 import Store
from dflash_core.target.cached import CachedTarget
from dflash_core.training.job import Job
from dflash_core.training.train import train
from dflash_core.workspace import Workspace, connect
from tests.console import shown
from tests.training.conftest import put_training_set, random_rows

MakeRecipe = Callable[..., Recipe]
ROWS = {f"{folder}%2Ffile{i}": random_rows(i, 20) for i, folder in enumerate(("maths", "code"))}


def nothing(*_: object) -> None:
    """No progress bar."""


@pytest.fixture
def workspace(make_recipe: MakeRecipe, s3: Store) -> Workspace:
    """One whose run is trained."""
    put_training_set(s3, ROWS)
    made = connect(make_recipe(max_steps=2, held_out_share=0.3))
    train(made, Job(), nothing)
    return with_evaluation(made, prompts=5, max_new_tokens=12, timed_prompts=2, batch=2, cut_prompts=2)


def with_recipe(workspace: Workspace, **changes: Any) -> Workspace:
    """The workspace with other tables in its recipe."""
    return replace(workspace, recipe=workspace.recipe.model_copy(update=changes))


def with_evaluation(workspace: Workspace, **changes: Any) -> Workspace:
    """The workspace with other settings of its recipe's evaluation."""
    return with_recipe(workspace, evaluation=workspace.recipe.evaluation.model_copy(update=changes))


def test_a_run_is_evaluated_once_on_prompts_that_training_never_saw(workspace: Workspace, s3: Store) -> None:
    seen: list[tuple[int, int]] = []
    report = evaluate_drafter(workspace, None, lambda done, total: seen.append((done, total)))
    held_out = {
        tuple(ids[: spans[0][0]])
        for rows in ROWS.values()
        for row_id, ids, spans in rows
        if is_held_out(workspace.recipe.seed, row_id, 0.3)
    }
    assert report.prompts == min(5, len(held_out)) > 2
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1][0] == seen[-1][1] == 4 * report.prompts + 3 * 2
    assert report.lossless
    assert report.tokens == 12 * report.prompts
    assert report.verification_steps == sum(report.histogram)
    assert len(report.acceptance_length_per_prompt) == report.prompts
    assert len(report.conditional_acceptance) == report.block_size - 1
    for length in (report.acceptance_length, report.acceptance_length_ngram, report.acceptance_length_no_features):
        assert 1 <= length <= report.block_size
    assert s3.get_record(f"drafter_eval/{report.run}/report.json", DrafterEval) == report
    assert s3.read(report.picture).startswith(b"\x89PNG")
    text = s3.read(report.markdown).decode()
    for value in (report.run, f"| drafter | {report.acceptance_length:.2f} |", "data:image/png;base64,", "%2Ffile0"):
        assert value in text

    again: list[object] = []
    assert evaluate_drafter(workspace, report.run, lambda *step: again.append(step)) == report
    assert not again
    wider = with_recipe(workspace, evaluation=EvaluationSettings(prompts=3, max_new_tokens=6))
    assert evaluate_drafter(wider, report.run, nothing).tokens == 18


def test_the_terminal_shows_what_matters(workspace: Workspace) -> None:
    report = evaluate_drafter(workspace, None, nothing)
    text = shown(terminal.acceptance(report, "s3://bucket/acceptance.png"))
    for value in (
        f"{report.acceptance_length:.2f}",
        "n-gram drafter",
        "temperature 1 (2 prompts)",
        "lossless: every output",
        "previous drafter: skipped",
        "no cut by thinking",
        "picture: s3://bucket/acceptance.png",
    ):
        assert value in text
    lossy = report.model_copy(update={"lossless": False, "differing_prompts": 2})
    assert "NOT lossless: 2 of 5 outputs differ" in shown(terminal.acceptance(lossy, ""))


def test_cuts_add_up_and_what_is_missing_has_a_reason(workspace: Workspace, s3: Store) -> None:
    report = evaluate_drafter(with_evaluation(workspace, prompts=40), None, nothing)
    files, folders = ([cut for cut in report.cuts if cut.cut == kind] for kind in ("file", "folder"))
    assert [cut.name for cut in folders] == ["code", "maths"]
    assert [cut.prompts for cut in folders] == [report.prompt_files.count(file) for file in sorted(ROWS)]
    assert {cut.name for cut in files} == set(report.prompt_files)
    assert sum(cut.prompts for cut in files) == report.prompts
    assert sum(cut.verification_steps for cut in files) == report.verification_steps == sum(report.histogram)
    accepted = sum((cut.acceptance_length - 1) * cut.verification_steps for cut in files)
    assert 1 + accepted / report.verification_steps == pytest.approx(report.acceptance_length)
    (hot,) = [cut for cut in report.cuts if cut.cut == "temperature"]
    assert (hot.name, hot.prompts) == ("1", 2)
    assert hot.acceptance_length_ngram is not None
    assert hot.acceptance_length_no_features is not None
    for cut in report.cuts:
        assert (cut.interval is None) == (cut.prompts < LEAST_PROMPTS)
        assert cut.interval is None or cut.interval[0] <= cut.acceptance_length <= cut.interval[1]
    assert report.acceptance_interval is not None
    assert report.speed_up_interval is None
    assert "too few prompts" in s3.read(report.markdown).decode()
    assert report.skipped_cuts == {"thinking": "the chat template has no option enable_thinking or thinking"}
    assert sum(report.stops.values()) > 0
    assert report.examples[0].refused != report.examples[0].said
    assert (report.timed_prompts, report.differing_prompts) == (2, 0)


def test_a_response_without_a_verification_step_is_left_out_of_the_mean_over_responses(
    workspace: Workspace, s3: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure_all = measure.Meter.measure

    def ended_at_once(
        self: measure.Meter, prompts: list[HeldOutPrompt], switch: ThinkingSwitch | None
    ) -> measure.Decodings:
        made = measure_all(self, prompts, switch)
        for side in (made.main.drafter, made.plain):
            side[1] = replace(side[1], tokens=side[1].tokens[:1], steps=())
        return made

    monkeypatch.setattr(measure.Meter, "measure", ended_at_once)
    report = evaluate_drafter(workspace, None, nothing)
    lengths = [*report.acceptance_length_per_prompt]
    assert (lengths.pop(1), report.responses_without_steps) == (1.0, 1)
    assert report.acceptance_length_response_mean == pytest.approx(sum(lengths) / len(lengths))
    assert "(left out: 1 that ended with the first token)" in s3.read(report.markdown).decode()


def test_the_clock_runs_only_after_each_side_has_decoded_once(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[tuple[int, ...], int, int]] = []

    def remember(
        target: CachedTarget, draft: Draft, prompt: tuple[int, ...], options: DecodingOptions
    ) -> DecodedAnswer:
        asked.append((prompt, draft.block_size, options.max_new_tokens))
        return generate(target, draft, prompt, options)

    monkeypatch.setattr(measure, "WARM_UP_TOKENS", 3)
    monkeypatch.setattr(measure, "generate", remember)
    evaluate_drafter(workspace, None, nothing)
    assert [limit for _, _, limit in asked] == [3, 3, 12, 12, 12, 12]
    assert asked[0][:2] == asked[2][:2]  # the drafter on the first prompt
    assert asked[1][:2] == asked[3][:2]  # and without


def test_each_thinking_state_is_measured_on_the_same_prompts(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts: list[HeldOutPrompt] = []
    drawn = module.held_out_prompts

    def remember(*arguments: Any) -> list[HeldOutPrompt]:
        prompts.extend(drawn(*arguments))
        return prompts

    def switch(*_: object) -> ThinkingSwitch:
        last = prompts[0].ids[-1]
        return ThinkingSwitch({"on": (last,), "off": (last, 7)})

    monkeypatch.setattr(module, "held_out_prompts", remember)
    monkeypatch.setattr(module, "thinking_switch", switch)
    report = evaluate_drafter(workspace, None, nothing)
    on, off = (cut for cut in report.cuts if cut.cut == "thinking")
    having = [p.ids[-1] == prompts[0].ids[-1] for p in prompts[:2]]
    assert (on.name, off.name) == ("on", "off")
    assert on.prompts == off.prompts == sum(having)
    assert on.verification_steps == sum(
        steps for steps, has in zip(report.verification_steps_per_prompt, having, strict=False) if has
    )
    assert "thinking" not in report.skipped_cuts


def test_a_new_drafter_is_compared_with_the_one_before_on_the_same_prompts(workspace: Workspace) -> None:
    workspace = with_evaluation(workspace, prompts=12)
    first = evaluate_drafter(workspace, None, nothing)
    assert (first.previous.verdict, first.previous.run) == ("skipped", None)
    other = with_recipe(workspace, training=workspace.recipe.training.model_copy(update={"max_steps": 3}))
    train(other, Job(), nothing)
    second = evaluate_drafter(other, None, nothing)
    assert second.previous.run == first.run
    assert second.previous.difference == pytest.approx(second.acceptance_length - first.acceptance_length)
    low, high = second.previous.interval or (1.0, 0.0)
    assert low <= second.previous.difference <= high
    third = evaluate_drafter(with_evaluation(other, max_new_tokens=6), second.run, nothing)
    assert third.previous.run == first.run, "a run is not its own predecessor"
    assert third.previous.verdict == "skipped"
    assert first.prompts_sha256[:12] in third.previous.reason
    assert third.prompts_sha256[:12] in third.previous.reason


def test_a_smaller_block_is_evaluated_and_a_larger_one_refused_with_both_values(workspace: Workspace) -> None:
    small, large = (with_evaluation(workspace, block_size=size) for size in (2, 5))
    report = evaluate_drafter(small, None, nothing)
    assert (report.block_size, len(report.histogram), len(report.conditional_acceptance)) == (2, 2, 1)
    assert report.lossless
    with pytest.raises(IncompatibleError, match=r"block_size 5 exceeds the 4 that run tiny-\w{12} was trained with"):
        evaluate_drafter(large, None, nothing)


def test_sampling_is_evaluated_too(workspace: Workspace) -> None:
    hot = with_recipe(workspace, evaluation=EvaluationSettings(prompts=3, max_new_tokens=8, temperature=1.0))
    report = evaluate_drafter(hot, None, nothing)
    assert (report.temperature, report.tokens, report.lossless) == (1.0, 24, False)


def test_an_export_is_the_published_folder_in_both_places(workspace: Workspace, s3: Store, tmp_path: Path) -> None:
    local = tmp_path / "out" / "drafter"
    workspace = with_recipe(workspace, export=ExportSettings(local_dir=local, speculators=False))
    bare = export_drafter(workspace, None)
    assert "had not been run" in (local / "README.md").read_text()
    report = evaluate_drafter(workspace, None, nothing)
    export = export_drafter(workspace, report.run)
    names = ["config.json", "model.safetensors", "README.md"]
    assert [f.key.rsplit("/", 1)[1] for f in export.files] == names
    assert export.files[:2] == bare.files[:2]
    for stored, name in zip(export.files, names, strict=True):
        assert s3.read(stored) == (local / name).read_bytes()
    assert s3.get_record(f"drafter_export/{report.run}/manifest.json", DrafterExport) == export
    assert sorted(f.name for f in local.iterdir()) == sorted([*names, "manifest.json"])
    assert [f.name for f in local.parent.iterdir()] == ["drafter"]
    card = (local / "README.md").read_text()
    for value in (report.run, export.training_set, f"{report.acceptance_length:.2f}", "| tokens |"):
        assert value in card
    assert json.loads((local / "config.json").read_text())["dtype"] == "bfloat16"
    assert all(t.dtype == torch.bfloat16 for t in load(s3.read(export.files[1])).values())
    assert load_drafter(local).config.mask_token_id == 96


def test_another_target_is_refused_with_both_values(workspace: Workspace, tmp_path: Path) -> None:
    other = tmp_path / "target"
    other.mkdir()
    for file in workspace.recipe.target.path.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"hidden_size": 48}))
    moved = with_recipe(workspace, target=workspace.recipe.target.model_copy(update={"path": other}))
    with pytest.raises(IncompatibleError, match=r"hidden size 32, this target has 48"):
        export_drafter(moved, None)
    with pytest.raises(IncompatibleError, match=r"was trained with target \w{12}, .* is \w{12}"):
        evaluate_drafter(moved, None, nothing)


def test_without_a_run_or_a_held_out_prompt_the_sentence_says_what_to_do(make_recipe: MakeRecipe, s3: Store) -> None:
    empty = connect(make_recipe())
    for call in (lambda: export_drafter(empty, None), lambda: evaluate_drafter(empty, "r9", nothing)):
        with pytest.raises(ObjectMissing, match="train a drafter first"):
            call()
    put_training_set(s3, ROWS)
    made = connect(make_recipe(max_steps=1, held_out_share=0.0))
    train(made, Job(), nothing)
    with pytest.raises(UserError, match=r"raise training\.held_out_share"):
        evaluate_drafter(made, None, nothing)
