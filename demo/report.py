"""The demo's report and what it must show."""

from dflash_core.records import Record

REQUIRED_ACCEPTANCE = 4.0
REQUIRED_RATIO = 1.5


class DemoReport(Record):
    """.dflash/demo/report.json."""

    acceptance_length: float
    acceptance_length_3gram: float
    acceptance_length_no_features: float
    lossless: bool
    prompts: int
    wall_s: float
    train_s: float
    rows_in: int
    rows_kept: int
    rows_rejected: int
    partitions_ok: int
    partitions_failed: int
    gate_first: str
    gate_second: str
    ui_url: str

    def broken_promises(self) -> list[str]:
        """What did not hold, a sentence each."""
        baseline = max(self.acceptance_length_3gram, self.acceptance_length_no_features)
        promises = {
            f"the first gate said {self.gate_first}, not fail": self.gate_first == "fail",
            f"the second gate said {self.gate_second}, not pass": self.gate_second == "pass",
            f"{self.partitions_failed} partitions failed": self.partitions_failed == 0,
            f"{self.rows_in} rows in, {self.rows_kept} kept and {self.rows_rejected} rejected": self.rows_in
            == self.rows_kept + self.rows_rejected,
            "the drafter changed the target's output": self.lossless,
            f"acceptance length {self.acceptance_length:.2f} is below {REQUIRED_ACCEPTANCE}": self.acceptance_length
            >= REQUIRED_ACCEPTANCE,
            f"acceptance length {self.acceptance_length:.2f} is below {REQUIRED_RATIO} x {baseline:.2f}, the best of "
            "3-gram and no features": self.acceptance_length >= REQUIRED_RATIO * baseline,
        }
        return [sentence for sentence, holds in promises.items() if not holds]
