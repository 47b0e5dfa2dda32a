"""The log of answers: nothing that was committed is lost, and the first committed answer is the answer."""

import threading
from pathlib import Path

from dflash_core.generation.answers import Answer
from dflash_core.generation.ledger import Ledger
from dflash_core.storage.s3 import Store


def answer(text: str) -> Answer:
    return Answer(
        content=text, finish_reason="stop", prompt_tokens=1, completion_tokens=2, model="m", server="s", seconds=0.1
    )


def content_of(ledger: Ledger, key: str) -> str:
    place = ledger.find(key)
    assert place is not None
    return ledger.read(place).content


def test_what_was_committed_is_there_on_another_machine(s3: Store, tmp_path: Path) -> None:
    ledger = Ledger(s3, "log/", tmp_path / "one")
    ledger.add("a", answer("first"))
    ledger.commit()
    ledger.add("b", answer("second"))
    ledger.add("c", answer("lost"))
    assert ledger.find("b") is None
    ledger.commit()
    other = Ledger(s3, "log/", tmp_path / "two")
    assert (content_of(other, "a"), content_of(other, "b"), len(other)) == ("first", "second", 3)
    assert list((tmp_path / "two").iterdir()) == []


def test_the_first_committed_answer_wins(s3: Store, tmp_path: Path) -> None:
    one, two = Ledger(s3, "log/", tmp_path), Ledger(s3, "log/", tmp_path)
    one.add("a", answer("of one"))
    two.add("a", answer("of two"))
    two.add("b", answer("of two"))
    one.commit()
    two.commit()
    one.add("b", answer("of one"))
    one.commit()
    for ledger in (one, two, Ledger(s3, "log/", tmp_path)):
        assert (content_of(ledger, "a"), content_of(ledger, "b")) == ("of one", "of two")


def test_many_writers_agree(s3: Store, tmp_path: Path) -> None:
    """Eight at once, all with their own answers to the same ten requests."""

    def write(name: int) -> None:
        ledger = Ledger(s3, "log/", tmp_path)
        for number in range(10):
            ledger.add(f"key-{number}", answer(f"{number} of {name}"))
            ledger.commit()
        ledgers.append(ledger)

    ledgers: list[Ledger] = []
    threads = [threading.Thread(target=write, args=(name,)) for name in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    said = {
        tuple(content_of(ledger, f"key-{n}") for n in range(10)) for ledger in [*ledgers, Ledger(s3, "log/", tmp_path)]
    }
    assert len(said) == 1


def test_nothing_waiting_writes_nothing(s3: Store, tmp_path: Path) -> None:
    ledger = Ledger(s3, "log/", tmp_path)
    ledger.commit()
    assert list(s3.list("log/")) == []
