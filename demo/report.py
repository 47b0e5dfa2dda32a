"""The demo's report and what it must show."""

from demo.files import FILES
from dflash_core.records import Record
from dflash_core.reports.sentences import rows_text

REQUIRED_ACCEPTANCE = 4.0
REQUIRED_RATIO = 1.5
REQUIRED_PROMPTS = 32
MOST_WALL_S = 8 * 60
MOST_TRAIN_S = 3 * 60
MOST_REPAIR_S = 60


class DemoReport(Record):
    """.dflash/demo/report.json."""

    acceptance_length: float
    acceptance_length_3gram: float
    acceptance_length_no_features: float
    lossless: bool
    prompts: int
    wall_s: float
    train_s: float
    repair_s: float
    """Until the bad file was generated again, server start included."""
    rows_generated: int
    rows_in: int
    rows_kept: int
    rows_dropped: int
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
            f"{self.partitions_ok} partitions are materialized, {self.partitions_failed} failed": self.partitions_ok
            == FILES
            and self.partitions_failed == 0,
            rows_text(self.rows_in, self.rows_kept, self.rows_dropped, self.rows_rejected): self.rows_in
            == self.rows_kept + self.rows_dropped + self.rows_rejected,
            "the drafter changed the target's output": self.lossless,
            f"only {self.prompts} prompts": self.prompts >= REQUIRED_PROMPTS,
            f"acceptance length {self.acceptance_length:.2f} is below {REQUIRED_ACCEPTANCE}": self.acceptance_length
            >= REQUIRED_ACCEPTANCE,
            f"acceptance length {self.acceptance_length:.2f} is below {REQUIRED_RATIO} x {baseline:.2f}, the best of "
            "3-gram and no features": self.acceptance_length >= REQUIRED_RATIO * baseline,
        }
        return [sentence for sentence, holds in promises.items() if not holds]

    def missed_times(self) -> list[str]:
        """What took longer than on the machine that it was made for; tells of the machine, so it breaks nothing."""
        times = {
            f"{self.wall_s:.0f} s in all, more than {MOST_WALL_S}": self.wall_s <= MOST_WALL_S,
            f"{self.train_s:.0f} s of training, more than {MOST_TRAIN_S}": self.train_s <= MOST_TRAIN_S,
            f"{self.repair_s:.0f} s to generate the bad file again, more than {MOST_REPAIR_S}": self.repair_s
            <= MOST_REPAIR_S,
        }
        return [sentence for sentence, holds in times.items() if not holds]
