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


NAMES = _words(
    "Ada Amir Anna Ben Chen Clara David Elif Emma Erik Farid George Grace Hana Hugo Ines Ivan Jack Julia Kira"
    " Lars Lena Leo Maria Maya Nadia Nora Omar Oscar Paula Peter Rosa Ruth Sara Simon Sofia Tara Theo Tom Vera"
    " Zoe"
)
ITEMS = _words(
    "apples bags beads bells books bottles buttons cakes candles carrots chairs coats dolls eggs flags flowers"
    " gloves hats keys kites lamps lemons letters maps masks pears pencils pens plates plums pots ribbons rings"
    " scarves shells stamps stickers stones tomatoes toys tulips"
)
CONTAINERS = _words("baskets boxes bundles crates sacks trays")
PLACES = _words(
    "bakery bridge cafe camp castle church city fair farm ferry forest garden harbor hotel island lake library"
    " market museum office park river school station tower village"
)
DAYS = _words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
FRACTIONS = {2: "half", 3: "a third", 4: "a quarter", 5: "a fifth"}
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
        "",
        ("Given: {fact}.\n", "Also given: {fact}.\n"),
        (
            "First, {what}: {left} {op} {right} = {result}, so {state}.\n",
            "Next, {what}: {left} {op} {right} = {result}, so {state}.\n",
        ),
        "Thus the answer is {total} {unit}.",
    ),
    Voice(
        ("Can you help me?", "I need some help."),
        "Okay, I want to know {ask}.",
        (" I read that {fact}", ", and that {fact}"),
        (
            ". Now {left} {word} {right} is {result}, which is {what}. Hence {state}",
            ". Then {left} {word} {right} is {result}, which is {what}. Hence {state}",
        ),
        ". It is {total} {unit}.",
    ),
    Voice(
        ("Homework:", "Here is an exercise."),
        "",
        ("1. {fact}.\n", "2. {fact}.\n", "3. {fact}.\n"),
        ("To get {what}, {order}. We get {result}.\n{State}.\n",),
        "The question was {ask}: {total} {unit}.",
    ),
    Voice(
        ("Think about this story.", "Listen to this story."),
        "",
        ("In the story {fact}.", " Also {fact}."),
        (
            " Because {left} {word} {right} makes {result}, {state}.",
            " Because {left} {word} {right} makes {result}, {state}.",
            " At the end {left} {word} {right} makes {result}, {state}.",
        ),
        " I found {what}: {total} {unit}.",
    ),
    Voice(
        ("Quick question.", "A short one."),
        "Wanted: {ask};",
        (" {fact};",),
        (" {what} = {left} {op} {right} = {result};",),
        " done: {total} {unit}.",
    ),
    Voice(
        ("Let us work together.", "We should check this one."),
        "We look for {what}.",
        (" We know {fact}.", " We know also {fact}."),
        (
            " We write {left} {op} {right} for {what} and find {result}. So {state}.",
            " We write {left} {op} {right} for {what} and find {result}. So {state}.",
        ),
        " We are sure: {total} {unit}.",
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
    name, item, place = rng.choice(NAMES), rng.choice(ITEMS), rng.choice(PLACES)
    verb = rng.choice(("buys", "orders", "chooses", "takes"))
    count, price = rng.randint(2, 9), rng.randint(2, 9)
    cost = count * price
    paid = ((cost + 1) // 10 + rng.randint(1, 2 if cost < 79 else 1)) * 10
    return Story(
        "buying",
        (f"{name} {verb} {count} {item} at the {place} for {price} coins each", f"{name} pays with {paid} coins"),
        f"how many coins {name} gets back",
        (
            Step("x", count, price, f"the price of the {item}", f"{name} owes the {place} {cost} coins"),
            Step("-", paid, cost, f"the change of {name}", f"{name} gets {paid - cost} coins back"),
        ),
        "coins",
    )


def _sharing(rng: random.Random) -> Story:
    name, item = rng.choice(NAMES), rng.choice(ITEMS)
    (day, other), place = _two(rng, DAYS), rng.choice(PLACES)
    verb = rng.choice(("finds", "makes", "collects", "gets"))
    friends, each = rng.randint(2, 6), rng.randint(3, 9)
    total = friends * each
    first = rng.randint(2, total - 2)
    return Story(
        "sharing",
        (
            f"{name} {verb} {first} {item} on {day} and {total - first} on {other}",
            f"{friends} friends at the {place} share the {item} of {name}",
        ),
        f"how many {item} each friend gets",
        (
            Step("+", first, total - first, f"the {item} of {day} and {other}", f"{name} {verb} {total} {item}"),
            Step("/", total, friends, f"the {item} of one friend", f"each friend at the {place} gets {each} {item}"),
        ),
        item,
    )


def _travelling(rng: random.Random) -> Story:
    name, (place, other), day = rng.choice(NAMES), _two(rng, PLACES), rng.choice(DAYS)
    verb = rng.choice(("walks", "rides", "sails", "runs"))
    speed, hours, more = rng.randint(2, 9), rng.randint(2, 9), rng.randint(2, 15)
    way = speed * hours
    return Story(
        "travelling",
        (
            f"on {day} {name} {verb} {hours} hours to the {place} at {speed} km an hour",
            f"the {other} is {more} km behind the {place}",
        ),
        f"how far {name} {verb} to the {other}",
        (
            Step("x", speed, hours, f"the way to the {place}", f"{name} {verb} {way} km to the {place}"),
            Step("+", way, more, f"the way to the {other}", f"{name} {verb} {way + more} km to the {other}"),
        ),
        "km",
    )


def _packing(rng: random.Random) -> Story:
    (name, other), item, container = _two(rng, NAMES), rng.choice(ITEMS), rng.choice(CONTAINERS)
    verb = rng.choice(("packs", "fills", "brings", "opens"))
    count, size, loose = rng.randint(2, 8), rng.randint(2, 8), rng.randint(2, 9)
    packed = count * size
    given = rng.randint(2, min(9, packed))
    left = packed + loose - given
    return Story(
        "packing",
        (
            f"{name} {verb} {count} {container} with {size} {item} in each",
            f"{name} has {loose} more {item} and sends {given} {item} to {other}",
        ),
        f"how many {item} {name} keeps",
        (
            Step("x", count, size, f"the {item} in the {container}", f"the {container} hold {packed} {item}"),
            Step("+", packed, loose, f"all the {item}", f"{name} has {packed + loose} {item}"),
            Step("-", packed + loose, given, f"the {item} without those of {other}", f"{name} keeps {left} {item}"),
        ),
        item,
    )


def _remaining(rng: random.Random) -> Story:
    (name, other), item, place = _two(rng, NAMES), rng.choice(ITEMS), rng.choice(PLACES)
    verb = rng.choice(("loses", "sells", "breaks", "leaves"))
    part = rng.choice(tuple(FRACTIONS))
    share = rng.randint(4, 9)
    owned, kept = part * share, part * share - share
    gone = rng.randint(2, kept - 2)
    return Story(
        "remaining",
        (
            f"{name} owns {owned} {item} and gives {FRACTIONS[part]} of the {item} to {other}",
            f"{name} {verb} {gone} {item} at the {place}",
        ),
        f"how many {item} {name} still owns",
        (
            Step("/", owned, part, f"the {item} for {other}", f"{other} gets {share} {item}"),
            Step("-", owned, share, f"the {item} which {name} keeps", f"{name} owns {kept} {item}"),
            Step("-", kept, gone, f"the {item} after the {place}", f"{name} still owns {kept - gone} {item}"),
        ),
        item,
    )


def _comparing(rng: random.Random) -> Story:
    (name, other), item, place = _two(rng, NAMES), rng.choice(ITEMS), rng.choice(PLACES)
    verb = rng.choice(("counts", "sees", "paints", "carries"))
    mine, more = rng.randint(2, 20), rng.randint(2, 9)
    theirs = mine + more
    return Story(
        "comparing",
        (f"{name} {verb} {mine} {item} at the {place}", f"{other} {verb} {more} {item} more than {name}"),
        f"how many {item} {name} and {other} have together",
        (
            Step("+", mine, more, f"the {item} of {other}", f"{other} {verb} {theirs} {item} at the {place}"),
            Step("+", mine, theirs, f"the {item} of {name} and {other}", f"they have {mine + theirs} {item} together"),
        ),
        item,
    )


def _ages(rng: random.Random) -> Story:
    (name, other), place = _two(rng, NAMES), rng.choice(PLACES)
    relation = rng.choice(("cousin", "friend", "teacher", "neighbor", "partner", "guest"))
    age, gap, later = rng.randint(4, 20), rng.randint(2, 9), rng.randint(2, 9)
    older = age + gap
    return Story(
        "ages",
        (
            f"{name} from the {place} is {age} years old",
            f"{other} is the {relation} of {name} and {gap} years older",
        ),
        f"how old {other} is in {later} years",
        (
            Step("+", age, gap, f"the age of the {relation}", f"{other} is {older} years old"),
            Step(
                "+",
                older,
                later,
                f"the age in {later} years",
                f"the {relation} {other} is then {older + later} years old",
            ),
        ),
        "years",
    )


def _working(rng: random.Random) -> Story:
    (name, other), item, place = _two(rng, NAMES), rng.choice(ITEMS), rng.choice(PLACES)
    verb = rng.choice(("washes", "paints", "repairs", "sorts"))
    rate, second, hours = rng.randint(2, 6), rng.randint(2, 6), rng.randint(2, 6)
    both = rate + second
    return Story(
        "working",
        (
            f"{name} {verb} {rate} {item} an hour and {other} {verb} {second} {item} an hour",
            f"they work {hours} hours at the {place}",
        ),
        f"how many {item} are ready after {hours} hours",
        (
            Step("+", rate, second, f"the {item} of one hour", f"{name} and {other} finish {both} {item} an hour"),
            Step("x", both, hours, f"the {item} of {hours} hours", f"{both * hours} {item} are ready at the {place}"),
        ),
        item,
    )


def _saving(rng: random.Random) -> Story:
    name, item, day = rng.choice(NAMES), rng.choice(ITEMS), rng.choice(DAYS)
    verb = rng.choice(("saves", "earns", "puts away", "wins"))
    weekly, weeks, before = rng.randint(2, 8), rng.randint(2, 8), rng.randint(2, 9)
    saved = weekly * weeks
    have = saved + before
    price = ((have + 1) // 10 + 1) * 10
    return Story(
        "saving",
        (
            f"every {day} {name} {verb} {weekly} coins",
            f"{name} had {before} coins before and wants {item} for {price} coins",
        ),
        f"how many coins {name} misses for the {item} after {weeks} weeks",
        (
            Step("x", weekly, weeks, f"the coins of {weeks} weeks", f"{name} {verb} {saved} coins in {weeks} weeks"),
            Step("+", saved, before, f"all the coins of {name}", f"{name} has {have} coins for the {item}"),
            Step("-", price, have, f"the missing coins for the {item}", f"{name} misses {price - have} coins"),
        ),
        "coins",
    )


FAMILIES: tuple[Callable[[random.Random], Story], ...] = (
    _buying,
    _sharing,
    _travelling,
    _packing,
    _remaining,
    _comparing,
    _ages,
    _working,
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
