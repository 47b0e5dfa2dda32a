"""Which drafter a new one is compared with: the last of the same target, whatever was evaluated between."""

import numpy as np

from dflash_core.evaluation.previous import compare, find_previous, latest_key, report_key
from dflash_core.records import DrafterEval, RunPointer
from dflash_core.storage.store import Store
from tests.reports import make_report

TARGETS = {"A": "a" * 64, "B": "b" * 64}
COUNTS = np.array([[15.0, 10.0], [25.0, 10.0]])


def evaluated(store: Store, run: str) -> DrafterEval:
    """Store the report of a run, its target being its first letter, as an evaluation does."""
    target = TARGETS[run[0]]
    previous = find_previous(store, run, target)
    report = make_report(store, run=run, target_fingerprint=target, previous=compare(COUNTS, "0" * 64, previous))
    store.put_record(report_key(run), report)
    store.put_record(latest_key(target), RunPointer(run=run))
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
    s3.put_record(latest_key(TARGETS["A"]), RunPointer(run="A1"))
    assert find_previous(s3, "A2", TARGETS["A"]) is None
