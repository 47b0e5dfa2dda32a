"""A step's numbers and the run's JSON lines."""

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


def test_every_number_has_a_name_and_what_was_not_measured_is_absent() -> None:
    assert set(metrics(3).scalars()) - set(metrics(2).scalars()) == {
        "held_out/loss",
        "held_out/accepted_prefix",
        "held_out/acceptance_length",
    }
    assert set(metrics(2).scalars()) - set(metrics(2, None).scalars()) == {"train/loss", "train/grad_norm"}
    assert metrics(2).scalars()["slot_accuracy/02"] == 0.25
    assert {"train/learning_rate", "speed/tokens_per_s", "speed/waiting_share"} <= set(metrics(2).scalars())
