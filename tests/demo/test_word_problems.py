"""The word problems are the same for a seed, disjoint between splits, and their reasoning follows the question."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from demo.word_problems import FAMILIES, VOICES, Split, WordProblem, split_of, word_problems


@pytest.fixture(scope="module")
def problems() -> list[WordProblem]:
    return list(word_problems(1_000, 1, "train"))


def test_a_seed_decides_the_problems_and_a_longer_run_begins_the_same(problems: list[WordProblem]) -> None:
    assert list(word_problems(100, 1, "train")) == problems[:100]
    assert [p.question for p in word_problems(100, 2, "train")] != [p.question for p in problems[:100]]


def test_held_out_questions_are_never_training_questions_whatever_the_seed(problems: list[WordProblem]) -> None:
    for seed in (1, 2, 3):
        heldout = list(word_problems(30, seed, "heldout"))
        assert all(split_of(p.question) == "heldout" for p in heldout)
        assert not {p.question for p in heldout} & {p.question for p in problems}


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_ids_are_unique(split: Split) -> None:
    ids = [p.id for p in word_problems(200, 5, split)]
    assert len(set(ids)) == 200


def test_problems_vary(problems: list[WordProblem]) -> None:
    families = Counter(p.family for p in problems)
    assert len(families) == len(FAMILIES)
    assert min(families.values()) > 1_000 / len(FAMILIES) / 2
    assert len({p.question for p in problems}) == len(problems)
    assert len({p.reasoning.split()[0] for p in problems}) >= len(VOICES) - 1


def test_numbers_are_one_token_long_and_formulas_hold(problems: list[WordProblem]) -> None:
    """Every formula written as one is right, and no number is beyond two digits or below one."""
    compute = {"+": int.__add__, "-": int.__sub__, "x": int.__mul__, "/": int.__floordiv__}
    found = 0
    for problem in problems:
        for left, op, right, result in re.findall(r"(\d+) ([-+x/]) (\d+) = (\d+)", problem.reasoning):
            assert compute[op](int(left), int(right)) == int(result), problem
            found += 1
        assert all(1 <= int(n) <= 99 for n in re.findall(r"\d+", problem.question + problem.reasoning)), problem
    assert found > 300


def test_reasoning_restates_the_question_and_reaches_the_answer(problems: list[WordProblem]) -> None:
    for problem in problems:
        names = set(re.findall(r"\b[A-Z][a-z]+\b", problem.question.split(". Find out")[0].split(" ", 3)[3]))
        assert any(name in problem.reasoning for name in names), problem
        assert str(problem.result) in problem.reasoning
        assert str(problem.result) in problem.answer


def test_the_opening_and_family_decide_the_first_words_of_the_reasoning(problems: list[WordProblem]) -> None:
    """What a drafter can only know from far away is decided there: one opening, one way to begin."""
    for voice in VOICES:
        begins = voice.start.partition("{")[0] or voice.facts[0].partition("{")[0]
        for problem in problems:
            if problem.question.startswith(voice.openings):
                assert problem.reasoning.startswith(begins)
