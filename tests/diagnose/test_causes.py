"""Every known cause is planted in a drafter and found; a healthy drafter is found healthy."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from dflash_core.decoding.acceptance import length_of
from dflash_core.decoding.decode import DecodedAnswer, DecodingOptions, VerificationStep, decode
from dflash_core.decoding.drafts import NoDraft
from dflash_core.diagnose.assumption import Assumption, RecordedAnswer
from dflash_core.diagnose.causes import Evidence, acceptance
from dflash_core.diagnose.diagnose import Diagnosis, diagnose_evidence
from dflash_core.drafter.model import Drafter
from tests.diagnose.conftest import ANSWER, ENDING, OTHER_ENDING, STEPS, World, answers


def diagnosed(evidence: Evidence) -> Diagnosis:
    return diagnose_evidence(evidence, "planted", 3.5, (), lambda done, total: None)


def blamed(found: Diagnosis) -> str:
    """The cause that the conclusion names."""
    return found.conclusion.split(" explains it")[0]


def test_a_healthy_drafter_is_found_healthy(world: World) -> None:
    found = diagnosed(world.evidence(world.drafter))
    assert found.served > 3.0
    assert not [finding for finding in found.findings if finding.explains]
    assert found.conclusion.startswith("Nothing found")
    assert {finding.cause for finding in found.findings} == {
        "layer offset",
        "position shift",
        "mask token",
        "template or thinking",
        "rope",
        "sliding window",
        "embedding",
        "off-policy rows",
        "truncation",
    }


@pytest.mark.parametrize(
    ("changes", "cause", "tried"),
    [
        ({"target_layer_ids": (1, 3)}, "layer offset", "features of layers 0, 2, not 1, 3"),
        ({"mask_token_id": 7}, "mask token", "mask token 63, not 7"),
        ({"rope_theta": 100.0}, "rope", "rope_theta 10000, not 100"),
        (
            {"layer_types": ("sliding_attention", "sliding_attention"), "sliding_window": 2},
            "sliding window",
            "layers F, F",
        ),
    ],
    ids=["layer offset", "mask token", "rope", "sliding window"],
)
def test_a_wrong_config_is_found(
    world: World,
    as_configured: Callable[..., Drafter],
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    cause: str,
    tried: str,
) -> None:
    drafter = as_configured(**changes)
    monkeypatch.setattr(world.target, "layer_ids", drafter.config.target_layer_ids)
    found = diagnosed(world.evidence(drafter))
    assert blamed(found) == cause, found.conclusion
    assert tried in found.conclusion
    best = next(finding for finding in found.findings if finding.cause == cause)
    assert best.after is not None
    assert best.after > 3.0 > found.served


@pytest.mark.parametrize(
    ("mistake", "cause", "tried"),
    [
        ({"block_shift": 1}, "position shift", "positions of blocks +1"),
        ({"feature_shift": -1}, "position shift", "features 1 token early"),
        ({"lm_head": "embedding"}, "embedding", "the embedding as lm_head (tied)"),
    ],
    ids=["blocks ahead", "features early", "tied head"],
)
def test_a_mistake_of_the_training_is_found(world: World, mistake: dict[str, Any], cause: str, tried: str) -> None:
    if "lm_head" in mistake:
        mistake = {"lm_head": world.target.embedding}
    assumption = replace(Assumption("planted", world.config), **mistake)
    found = diagnosed(world.evidence(world.train(assumption, world.texts, STEPS)))
    assert blamed(found) == cause, found.conclusion
    assert tried in found.conclusion


def test_rows_that_the_target_never_said_are_found(world: World) -> None:
    generator = torch.Generator().manual_seed(5)
    rows = [
        RecordedAnswer(
            t.name, (*t.ids[: t.answer], *torch.randint(0, 59, (ANSWER,), generator=generator).tolist()), t.answer
        )
        for t in world.texts
    ]
    drafter = world.train(Assumption("as it is", world.config), rows, STEPS)
    found = diagnosed(world.evidence(drafter, rows))
    assert blamed(found) == "off-policy rows", found.conclusion
    finding = next(finding for finding in found.findings if finding.cause == "off-policy rows")
    assert int(finding.note.split(" %")[0]) < 10


def test_rows_that_were_cut_short_are_found(world: World) -> None:
    rows = [RecordedAnswer(t.name, t.ids[: t.answer + 16], t.answer) for t in world.texts]
    drafter = world.train(Assumption("as it is", world.config), rows, STEPS)
    found = diagnosed(world.evidence(drafter, rows))
    assert blamed(found) == "truncation", found.conclusion
    assert "24 tokens" in found.conclusion


def test_a_template_that_serving_does_not_use_is_found(world: World) -> None:
    evidence = world.evidence(world.drafter, ending=OTHER_ENDING)
    found = diagnosed(evidence)
    assert blamed(found) == "template or thinking", found.conclusion
    assert found.served == length_of(acceptance(evidence.served)) < 3.0
    assert evidence.served_prompts == [(*p[: -len(ENDING)], *OTHER_ENDING) for p in evidence.prompts]
    finding = next(finding for finding in found.findings if finding.cause == "template or thinking")
    assert finding.note == "8 of 8 prompts end otherwise when served"


def test_damaged_weights_are_told_although_no_cause_explains_them(world: World) -> None:
    drafter = Drafter(world.config)
    drafter.load_state_dict(world.drafter.state_dict() | {"norm.weight": torch.linspace(-1.0, 1.0, 64)})
    note = "1 of 25 tensors differ from run r, first norm.weight"
    found = diagnose_evidence(world.evidence(drafter.eval()), "planted", 3.5, (note,), lambda done, total: None)
    assert found.conclusion == (
        f"Unexplained: training reported 3.50, the same rows now give {found.measured_prefix:.2f}; {note}."
    )


def test_decoding_that_accepts_less_than_the_recorded_text_promises_is_never_called_healthy(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault of the decoding itself, which none of the nine causes is: its steps accept nothing or one proposal."""

    def poor(self: Evidence, prompts: list[tuple[int, ...]]) -> list[DecodedAnswer]:
        made = decode(self.target, NoDraft(), prompts, DecodingOptions(ANSWER, frozenset()), batch=8)
        return [
            replace(g, block_size=4, steps=(VerificationStep(0, 1),) * 34 + (VerificationStep(1, 1),) * 3) for g in made
        ]

    monkeypatch.setattr(Evidence, "_decode", poor)
    found = diagnosed(world.evidence(world.drafter))
    assert not [finding for finding in found.findings if finding.explains]
    assert found.served < 1.2 < 3.0 < found.measured_prefix
    assert found.conclusion.startswith(
        f"Unexplained: recorded text gives {found.measured_prefix:.2f}, decoding its prompts {found.served:.2f}; "
        "training reported 3.50; `dflash evaluate` shows where it stops"
    )


def test_too_few_prompts_decide_nothing(world: World) -> None:
    found = diagnosed(world.evidence(world.drafter, world.texts[:3]))
    assert found.conclusion.startswith(
        "Not decided: 3 held-out prompts are too few to tell a difference from noise, 8 "
    )
    assert found.conclusion.endswith("raise training.held_out_share.")


def test_answers_of_the_fixture_are_the_targets_own(world: World) -> None:
    again = answers(world.target, [text.ids[: text.answer] for text in world.texts], ANSWER)
    assert again == world.texts
