"""Word problems with step by step reasoning, for training and questioning the demo's target.

The trade-off: a drafter is only worth its features when the text is *decided* by far context but not by the last
few tokens. So a story draws its names, verbs, items, places and numbers at random, the reasoning restates them, and
the wording of the reasoning (facts, steps, formulas, answer) is fixed by how the question was put: its opening picks
the voice, its last sentence the form of the answer. A model which reads the question has little left to guess; a
model that counts pairs and triples of tokens has to guess at every slot.

All text here is our own. A problem depends on (seed, index, split) alone.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

Split = Literal["train", "heldout"]


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NAMES = _words("Ada Amir Anna Ben Clara David Elif Emma George Hana Jack Julia Leo Maya Nora Omar Paula Peter Ruth Tom")
ITEMS = _words(
    "apples beads bells books bottles cakes candles chairs coats eggs flags flowers hats keys lamps maps masks pears"
    " pencils plates shells stamps stones toys"
)
OPERATION_WORDS = {"+": "plus", "-": "minus", "x": "times", "/": "divided by"}
OPERATION_ORDERS = {
    "+": "add {left} and {right}",
    "-": "subtract {right} from {left}",
    "x": "multiply {left} by {right}",
    "/": "divide {left} by {right}",
}


@dataclass(frozen=True)
class WordProblem:
    """One problem as text: `question` (user turn), `reasoning` (thought), `answer` (reply), `result` (the number)."""

    id: str
    family: str
    question: str
    reasoning: str
    answer: str
    result: int


@dataclass(frozen=True)
class Step:
    """One small calculation `left op right = result`: what it is of, and the sentence which is true after it."""

    op: str
    left: int
    right: int
    what: str
    state: str

    @property
    def result(self) -> int:
        """The right side of the formula; divisions are exact by construction."""
        match self.op:
            case "+":
                return self.left + self.right
            case "-":
                return self.left - self.right
            case "x":
                return self.left * self.right
            case _:
                return self.left // self.right


@dataclass(frozen=True)
class Story:
    """What happens, before anyone words it: given facts, the question's core, the calculations, the unit."""

    family: str
    facts: tuple[str, ...]
    ask: str
    steps: tuple[Step, ...]
    unit: str


@dataclass(frozen=True)
class Voice:
    """How a question opens, and how the reasoning that belongs to this opening is worded.

    `facts` has one template a fact and `steps` one a step (the last template repeats when a story has more).
    """

    openings: tuple[str, ...]
    start: str
    facts: tuple[str, ...]
    steps: tuple[str, ...]
    close: str


VOICES = (
    Voice(
        ("Please solve this.", "Solve the problem below."),
        "I write down what is given.",
        (" First, {fact}.", " Then, {fact}."),
        (
            "\nThe first thing to find is {what}. That is {left} {op} {right} = {result}, so {state}.",
            "\nThe next thing to find is {what}. That is {left} {op} {right} = {result}, so {state}.",
        ),
        "\nThis is what was asked, so the answer is {total} {unit}.",
    ),
    Voice(
        ("Can you help me?", "I need some help."),
        "Okay, I want to know {ask}.",
        (" I read that {fact}", ", and I also read that {fact}"),
        (
            ". To know {what} I take {left} {word} {right}, which is {result}. That means that {state}",
            ". Now to know {what} I take {left} {word} {right}, which is {result}. That means that {state}",
        ),
        ". So I can tell that it is {total} {unit}.",
    ),
    Voice(
        ("Homework:", "Here is an exercise."),
        "This is an exercise about {ask}.",
        ("\n1. It is given that {fact}.", "\n2. It is given that {fact}."),
        ("\nSo we need {what}. We {order} and we get {result}. With this, {state}.",),
        "\nThe exercise is done, and the result is {total} {unit}.",
    ),
    Voice(
        ("Think about this story.", "Listen to this story."),
        "The story is easy to follow.",
        (" At first {fact}.", " After that {fact}."),
        (
            " Because {left} {word} {right} makes {result}, we know now that {state}.",
            " And because {left} {word} {right} makes {result}, we know in the end that {state}.",
        ),
        " This is how the story ends, and so {what} must be {total} {unit}.",
    ),
)

# The last sentence of the question, and the form of the answer it asks for.
ANSWER_FORMS = (
    ("Answer in a sentence.", "{State}."),
    ("Give the number and the unit.", "{total} {unit}"),
    ("Show the last formula.", "{left} {op} {right} = {total}, so {total} {unit}"),
    ("Say what it is.", "We asked for {what}. It is {total} {unit}."),
)


def _two(rng: random.Random, words: tuple[str, ...]) -> tuple[str, str]:
    first, second = rng.sample(words, 2)
    return first, second


def _buying(rng: random.Random) -> Story:
    name, item = rng.choice(NAMES), rng.choice(ITEMS)
    count, price = rng.randint(2, 9), rng.randint(2, 9)
    cost = count * price
    paid = ((cost + 1) // 10 + rng.randint(1, 2 if cost < 79 else 1)) * 10
    return Story(
        "buying",
        (f"{name} buys {count} {item} for {price} coins each", f"{name} pays with {paid} coins"),
        f"how many coins {name} gets back",
        (
            Step("x", count, price, f"the price of all the {item}", f"{name} has to pay {cost} coins for the {item}"),
            Step("-", paid, cost, f"the change for {name}", f"{name} gets {paid - cost} coins back"),
        ),
        "coins",
    )


def _sharing(rng: random.Random) -> Story:
    name, item = rng.choice(NAMES), rng.choice(ITEMS)
    friends, each = rng.randint(2, 6), rng.randint(3, 9)
    total = friends * each
    first = rng.randint(2, total - 2)
    return Story(
        "sharing",
        (
            f"{name} finds {first} {item} in the morning and {total - first} {item} in the evening",
            f"{friends} friends share all the {item} of {name}",
        ),
        f"how many {item} each of the friends gets",
        (
            Step(
                "+", first, total - first, f"how many {item} {name} finds", f"{name} finds {total} {item} on that day"
            ),
            Step("/", total, friends, "the part of one friend", f"each of the {friends} friends gets {each} {item}"),
        ),
        item,
    )


def _packing(rng: random.Random) -> Story:
    name, item = rng.choice(NAMES), rng.choice(ITEMS)
    count, size, loose = rng.randint(2, 8), rng.randint(2, 8), rng.randint(2, 9)
    packed = count * size
    return Story(
        "packing",
        (
            f"{name} fills {count} boxes with {size} {item} in each box",
            f"{name} still has {loose} more {item} on the table",
        ),
        f"how many {item} {name} has in all",
        (
            Step("x", count, size, f"how many {item} are in the boxes", f"the {count} boxes hold {packed} {item}"),
            Step("+", packed, loose, f"all the {item} of {name}", f"{name} has {packed + loose} {item} in all"),
        ),
        item,
    )


def _remaining(rng: random.Random) -> Story:
    (name, other), item = _two(rng, NAMES), rng.choice(ITEMS)
    owned, given, lost = rng.randint(20, 60), rng.randint(2, 9), rng.randint(2, 9)
    kept = owned - given
    return Story(
        "remaining",
        (
            f"{name} owns {owned} {item} and gives {given} of the {item} to {other}",
            f"{name} loses {lost} of the {item}",
        ),
        f"how many {item} {name} still owns",
        (
            Step(
                "-", owned, given, f"the {item} without those for {other}", f"{name} owns {kept} {item} after the gift"
            ),
            Step("-", kept, lost, f"the {item} without those that are lost", f"{name} still owns {kept - lost} {item}"),
        ),
        item,
    )


def _comparing(rng: random.Random) -> Story:
    (name, other), item = _two(rng, NAMES), rng.choice(ITEMS)
    mine, more = rng.randint(2, 20), rng.randint(2, 9)
    theirs = mine + more
    return Story(
        "comparing",
        (f"{name} counts {mine} {item} at home", f"{other} counts {more} {item} more than {name}"),
        f"how many {item} {name} and {other} have together",
        (
            Step("+", mine, more, f"how many {item} {other} has", f"{other} counts {theirs} {item} at home"),
            Step("+", mine, theirs, f"the {item} of both", f"{name} and {other} have {mine + theirs} {item} together"),
        ),
        item,
    )


def _saving(rng: random.Random) -> Story:
    name, item = rng.choice(NAMES), rng.choice(ITEMS)
    weekly, weeks, before = rng.randint(2, 8), rng.randint(2, 8), rng.randint(2, 9)
    saved = weekly * weeks
    return Story(
        "saving",
        (
            f"{name} puts away {weekly} coins every week to buy {item}",
            f"{name} had {before} coins before the first week",
        ),
        f"how many coins {name} has for the {item} after {weeks} weeks",
        (
            Step("x", weekly, weeks, f"the coins of {weeks} weeks", f"{name} puts away {saved} coins in {weeks} weeks"),
            Step("+", saved, before, f"all the coins of {name}", f"{name} has {saved + before} coins for the {item}"),
        ),
        "coins",
    )


FAMILIES: tuple[Callable[[random.Random], Story], ...] = (
    _buying,
    _sharing,
    _packing,
    _remaining,
    _comparing,
    _saving,
)


def _capital(sentence: str) -> str:
    return sentence[0].upper() + sentence[1:]


def _step_fields(step: Step, unit: str) -> dict[str, str]:
    return {
        "left": str(step.left),
        "right": str(step.right),
        "result": str(step.result),
        "total": str(step.result),
        "op": step.op,
        "word": OPERATION_WORDS[step.op],
        "order": OPERATION_ORDERS[step.op].format(left=step.left, right=step.right),
        "what": step.what,
        "state": step.state,
        "State": _capital(step.state),
        "unit": unit,
    }


def _reason(story: Story, voice: Voice) -> str:
    last = _step_fields(story.steps[-1], story.unit) | {"ask": story.ask}
    facts = story.facts
    parts = [voice.start.format(**last)]
    parts += [voice.facts[min(i, len(voice.facts) - 1)].format(fact=fact) for i, fact in enumerate(facts)]
    for i, step in enumerate(story.steps):
        parts.append(voice.steps[min(i, len(voice.steps) - 1)].format(**_step_fields(step, story.unit)))
    parts.append(voice.close.format(**last))
    return "".join(parts).strip()


def make_problem(rng: random.Random, problem_id: str) -> WordProblem:
    """Draw one story and word it; `rng` is used up in a fixed order, so equal states give equal problems."""
    story = rng.choice(FAMILIES)(rng)
    voice = rng.choice(VOICES)
    opening = rng.choice(voice.openings)
    form, answer = rng.choice(ANSWER_FORMS)
    told = ". ".join(_capital(fact) for fact in story.facts)
    question = f"{opening} {told}. Find out {story.ask}. {form}"
    last = story.steps[-1]
    reply = answer.format(**_step_fields(last, story.unit))
    return WordProblem(problem_id, story.family, question, _reason(story, voice), reply, last.result)


def split_of(question: str) -> Split:
    """The half a question belongs to, by its text: so the halves are disjoint under every seed (1 in 16 held out)."""
    return "heldout" if zlib.crc32(question.encode()) % 16 == 0 else "train"


def word_problems(count: int, seed: int, split: Split) -> Iterator[WordProblem]:
    """Yield `count` problems of one split; a longer run with the same seed begins with the same problems."""
    made = index = 0
    while made < count:
        problem = make_problem(random.Random(f"{seed}/{index}"), f"{split}-{seed}-{index:06d}")
        index += 1
        if split_of(problem.question) == split:
            made += 1
            yield problem
