"""The run's JSON lines."""

from pathlib import Path

from dflash_core.training.metrics import MetricsFile
from tests.training.test_trackers import metrics


def test_what_a_killed_attempt_wrote_beyond_its_checkpoint_goes(tmp_path: Path) -> None:
    """Each step has one line, also where the kill came before the first checkpoint, or in the midst of a line."""
    path = tmp_path / "below" / "metrics.jsonl"
    for steps_done, left in ((0, 3), (2, 2), (0, 0)):
        file = MetricsFile(path, steps_done)
        assert path.read_text().count("\n") == (steps_done if left else 0)
        for step in range(steps_done, left):
            file.write(metrics(step))
        assert file.flush() == len(path.read_bytes())
        file.close()
        with path.open("a") as torn:
            torn.write('{"step": ')
