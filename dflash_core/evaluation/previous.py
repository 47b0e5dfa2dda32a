"""The drafter that was evaluated before: is the new one worse, beyond noise?

The trade-off: only paired numbers count (the same prompts under the same settings), since the spread between prompts is
larger than any difference worth seeing; where they cannot be paired, or are too few, the comparison is skipped, and
says why.
"""

import numpy as np

from dflash_core.errors import ObjectMissing
from dflash_core.evaluation.acceptance import LEAST_PROMPTS, Counts, difference_interval, length_of
from dflash_core.records import DrafterEval, PreviousDrafter, RunPointer
from dflash_core.storage.store import Store


def report_key(run: str) -> str:
    """Where the evaluation of a run lies."""
    return f"drafter_eval/{run}/report.json"


def latest_key(target_fingerprint: str) -> str:
    """Where the run that was evaluated last for a target is named."""
    return f"drafter_eval/latest-{target_fingerprint[:12]}.json"


def find_previous(store: Store, run: str, target_fingerprint: str) -> DrafterEval | None:
    """The evaluation before that of `run` for this target: each names its predecessor, the pointer names the last."""
    try:
        name: str | None = store.get_record(latest_key(target_fingerprint), RunPointer).run
    except ObjectMissing:
        return None
    seen = set[str]()
    while name is not None and name not in seen:
        seen.add(name)
        report = store.find_record(report_key(name), DrafterEval)
        if report is None or report.target_fingerprint != target_fingerprint:
            return None
        if name != run:
            return report
        name = report.previous.run
    return None


def compare(ours: Counts, prompts_sha256: str, previous: DrafterEval | None) -> PreviousDrafter:
    """Ours against the previous drafter's, prompt by prompt.

    Args:
        ours: counts of the new drafter.
        prompts_sha256: hash of prompts and settings of decoding.
        previous: None: there is none.
    """
    if previous is None:
        return PreviousDrafter(verdict="skipped", reason="no other drafter of this target has been evaluated")
    if previous.prompts_sha256 != prompts_sha256:
        return PreviousDrafter(
            verdict="skipped",
            reason=f"run {previous.run} was evaluated on other prompts or settings ({previous.prompts} prompts with "
            f"hash {previous.prompts_sha256[:12]}, now {len(ours)} with {prompts_sha256[:12]})",
            run=previous.run,
            acceptance_length=previous.acceptance_length,
        )
    steps = np.array(previous.verification_steps_per_prompt, np.float64)
    theirs = np.stack([(np.array(previous.acceptance_length_per_prompt) - 1) * steps, steps], 1)
    interval = difference_interval(ours, theirs)
    difference = length_of(ours) - length_of(theirs)
    if interval is None:
        return PreviousDrafter(
            verdict="skipped",
            reason=f"{difference:+.2f} against run {previous.run}, but {len(ours)} prompts are too few to tell it from "
            f"noise ({LEAST_PROMPTS} are needed)",
            run=previous.run,
            acceptance_length=previous.acceptance_length,
            difference=difference,
        )
    low, high = interval
    return PreviousDrafter(
        verdict="worse" if high < 0 else "better" if low > 0 else "no worse",
        reason=f"{difference:+.2f} ({low:+.2f} to {high:+.2f}) against run {previous.run} on the same {len(ours)} "
        "prompts",
        run=previous.run,
        acceptance_length=previous.acceptance_length,
        difference=difference,
        interval=interval,
    )
