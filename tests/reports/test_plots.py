"""Pictures are real and drawn for any data: of a training set, and a learning curve of a run that measured little."""

from io import BytesIO
from pathlib import Path

import matplotlib.image
import pytest

from dflash_core.reports.plots import learning_curve, training_set_picture
from dflash_core.statistics.merge import merge_statistics
from dflash_core.statistics.statistics import FileStatistics
from tests.training.test_trackers import metrics


def test_the_merged_picture_is_drawn_with_and_without_rows(files: list[FileStatistics]) -> None:
    for some in (files, files[3:4], []):
        assert training_set_picture(merge_statistics(some), some).startswith(b"\x89PNG")


@pytest.mark.parametrize("steps", [0, 1, 9, 200])
@pytest.mark.parametrize("lost", [False, True])
def test_a_picture_of_any_run(tmp_path: Path, steps: int, lost: bool) -> None:
    file = tmp_path / "metrics.jsonl"
    lines = [metrics(step, None if lost else 5.0 / step).model_dump_json() for step in range(1, steps + 1)]
    file.write_text("".join(f"{line}\n" for line in lines))
    picture = matplotlib.image.imread(BytesIO(learning_curve(file)), format="png")
    height, width = picture.shape[:2]
    assert width > 2 * height > 200
    assert (picture[..., :3] < 0.9).any()


def test_more_lines_draw_more(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text(metrics(1).model_dump_json() + "\n")
    one = learning_curve(file)
    file.write_text("".join(metrics(step).model_dump_json() + "\n" for step in range(1, 9)))
    assert learning_curve(file) != one
