"""A core command in a process of its own: its result, its refusal, its death, and no orphan after an interruption."""

import signal
import threading
import time
from pathlib import Path

import dagster as dg
import psutil
import pytest

from dflash_assets import process
from dflash_core.records import Reject

COMMAND = """
import json, os, signal, sys, time
result = sys.argv[sys.argv.index("--result") + 1]
match sys.argv[1]:
    case "answer":
        open(result, "w").write('{"line": 1, "reason": "blank"}')
    case "refuse":
        open(result, "w").write('{"error": "no such drafter; train one first"}')
        sys.exit(2)
    case "die":
        print("about to die", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    case "wait":
        open(sys.argv[2], "w").write(str(os.getpid()))
        time.sleep(600)
"""


@pytest.fixture(autouse=True)
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "core_command.py").write_text(COMMAND)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


def test_the_result_is_what_the_command_wrote() -> None:
    assert process.run_core(["core_command", "answer"], Reject) == Reject(line=1, reason="blank")


def test_a_refusal_is_the_commands_own_sentence() -> None:
    with pytest.raises(dg.Failure, match="no such drafter; train one first") as failure:
        process.run_core(["core_command", "refuse"], Reject)
    assert failure.value.allow_retries is False


def test_a_death_shows_the_signal_and_the_last_lines() -> None:
    with pytest.raises(dg.Failure, match=r"killed by SIGKILL(.|\n)*about to die"):
        process.run_core(["core_command", "die"], Reject)


def test_an_interruption_leaves_no_process(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    main_thread = threading.main_thread().ident

    def interrupt() -> None:
        while not pid_file.exists() or not pid_file.read_text():
            time.sleep(0.05)
        assert main_thread is not None
        signal.pthread_kill(main_thread, signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        process.run_core(["core_command", "wait", str(pid_file)], Reject)
    assert not psutil.pid_exists(int(pid_file.read_text()))
