"""Every file has a small picture, valid whatever its texts, that names its spike and its losses."""

from xml.etree import ElementTree

from dflash_core.reports.file_picture import file_picture
from dflash_core.statistics.statistics import FileStatistics

SVG = "{http://www.w3.org/2000/svg}"


def test_every_file_has_a_small_picture_that_is_valid_whatever_its_texts(files: list[FileStatistics]) -> None:
    for file in files:
        picture = file_picture(file)
        texts = [element.text for element in ElementTree.fromstring(picture).iter(f"{SVG}text")]
        assert "Supervised tokens per row" in texts
        assert len(picture) <= 8_000, file.partition


def test_the_picture_names_the_spike_and_what_was_lost(files: list[FileStatistics]) -> None:
    _, spiky, lossy, *_ = (file_picture(file).decode() for file in files)
    assert "47.4 % of all rows have 6 tokens" in spiky
    assert "too few sup" in spiky
    assert "more</text>" in lossy
