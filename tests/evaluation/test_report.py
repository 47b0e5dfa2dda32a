"""Which drafter a new one is compared with (the last of the same target), and where drafting stops, step by step."""

import numpy as np
from tokenizers import Tokenizer, decoders, models

from dflash_core.decoding.decode import DecodedAnswer, VerificationStep
from dflash_core.decoding.prompts import HeldOutPrompt
from dflash_core.evaluation.report import compare, find_previous, frequent_stops, stop_examples, stops_of
from dflash_core.records import DrafterEval, RunPointer
from dflash_core.storage.layout import RunKeys, latest_evaluation
from dflash_core.storage.s3 import Store
from tests.make_report import make_report

TARGETS = {"A": "a" * 64, "B": "b" * 64}
COUNTS = np.array([[15.0, 10.0], [25.0, 10.0]])
# First token 1; then [2, 3 | 9 fell, 4]; then [5, 6, 7 all stood, 8]; then [| 9 fell, 4]; the last step is cut off.
ANSWER = DecodedAnswer(
    tokens=(1, 2, 3, 4, 5, 6, 7, 8, 4),
    block_size=4,
    steps=(VerificationStep(2, 9), VerificationStep(3, None), VerificationStep(0, 9), VerificationStep(2, 9)),
    seconds=1.0,
)


def evaluated(store: Store, run: str) -> DrafterEval:
    """Store the report of a run, its target being its first letter, as an evaluation does."""
    target = TARGETS[run[0]]
    previous = find_previous(store, run, target)
    report = make_report(store, run=run, target_fingerprint=target, previous=compare(COUNTS, "0" * 64, previous))
    store.put_record(RunKeys(run).report, report)
    store.put_record(latest_evaluation(target), RunPointer(run=run))
    return report


def test_a_drafter_of_another_target_in_between_does_not_break_the_chain(s3: Store) -> None:
    runs = ("A1", "B1", "A2", "B2", "A3", "A3", "A2")
    previous = [evaluated(s3, run).previous for run in runs]
    assert [p.run for p in previous] == [None, None, "A1", "B1", "A2", "A2", "A3"]


def test_too_few_prompts_to_tell_a_difference_from_noise_are_no_verdict(s3: Store) -> None:
    previous = make_report(
        s3, acceptance_length=4.1, acceptance_length_per_prompt=(4.1,), verification_steps_per_prompt=(10,)
    )
    found = compare(np.array([[30.0, 10.0]]), "0" * 64, previous)
    assert (found.verdict, found.run, found.interval) == ("skipped", "test-1", None)
    assert found.reason == ("-0.10 against run test-1, but 1 prompts are too few to tell it from noise (8 are needed)")


def test_a_report_that_is_gone_ends_the_chain(s3: Store) -> None:
    s3.put_record(latest_evaluation(TARGETS["A"]), RunPointer(run="A1"))
    assert find_previous(s3, "A2", TARGETS["A"]) is None


def tokenizer() -> Tokenizer:
    made = Tokenizer(models.WordLevel({f"w{i}": i for i in range(12)}, unk_token="w0"))
    made.decoder = decoders.Fuse()
    return made


def test_stops_are_read_from_the_steps() -> None:
    assert [tuple(stop) for stop in stops_of(ANSWER)] == [(0, 2, 9, 4), (7, 0, 9, 4)]
    assert frequent_stops(tokenizer(), [ANSWER, ANSWER]) == {"w4": 4}


def test_an_example_is_the_step_that_accepted_least() -> None:
    prompt = HeldOutPrompt((10, 11), "part-00", 0, "row")
    (example,) = stop_examples(tokenizer(), [prompt], [ANSWER])
    assert (example.file, example.row_id) == ("part-00", "row")
    assert (example.accepted, example.refused, example.said) == ("", "w9", "w4")
    assert example.before == "w10w11" + "".join(f"w{t}" for t in ANSWER.tokens[:8])
    perfect = DecodedAnswer((1, 2, 3), 3, (VerificationStep(2, None),), 1.0)
    assert stop_examples(tokenizer(), [prompt], [perfect]) == ()
