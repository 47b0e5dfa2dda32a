"""A process that stands still is noticed, one that has ended is not missed."""

import os
import time
from pathlib import Path

import pytest

from dflash_core.training import pulse
from dflash_core.training.pulse import Pulses, beating


def test_a_process_beats_until_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulse, "BEAT_S", 0.01)
    file = tmp_path / "pulse-0"
    with beating(file):
        os.utime(file, ns=(0, 0))
        deadline = time.monotonic() + 60
        while file.stat().st_mtime_ns == 0:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert not file.exists()


def test_silence_is_counted_in_looks_and_for_each_rank(tmp_path: Path) -> None:
    files = [tmp_path / str(rank) for rank in range(3)]
    pulses = Pulses(files)
    for file in files[:2]:  # the third has not begun yet
        file.touch()
    for look in range(5):
        os.utime(files[0], ns=(0, look))
        pulses.look()
    assert pulses.silent(4) == [1]
    assert pulses.silent(5) == []
    os.utime(files[1], ns=(0, 99))
    pulses.look()
    assert pulses.silent(1) == [0]
    files[0].unlink()
    pulses.look()
    assert pulses.silent(1) == [1]
