"""A process of ours ends with us, says what it has to say, and whoever kills it is told of."""

import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from dflash_core import processes
from dflash_core.errors import TrainingStopped, UserError
from dflash_core.processes import (
    Answered,
    Child,
    Died,
    News,
    Nursery,
    Parent,
    Refused,
    Told,
    free_ports,
    listen,
    run,
    running_server,
    start,
)

SLEEP = ["/bin/sleep", "600"]
HOLD = """
import sys, time
from dflash_core import processes
from tests import test_processes
child = processes.start(test_processes.work_in_a_grandchild, name="test")
for _ in range(200):
    for _, news in processes.listen([child]):
        print(news.value, child.process.pid, flush=True)
        time.sleep(600)
"""


def add(parent: Parent, a: int, b: int) -> int:
    parent.tell("adding")
    return a + b


def refuse(parent: Parent) -> None:
    raise TrainingStopped("stopped after step 3")


def crash(parent: Parent) -> None:
    print("the last thing it said", flush=True)
    raise ZeroDivisionError("by nothing")


def hang(parent: Parent) -> None:
    parent.tell(os.getpid())
    time.sleep(600)


def echo(parent: Parent) -> None:
    while True:
        parent.tell(parent.take())


def warn(parent: Parent) -> None:
    logging.getLogger("dflash_core.somewhere").warning("mind the %s", "gap")


def save_when_interrupted(parent: Parent, file: Path) -> None:
    try:
        parent.tell("ready")
        time.sleep(600)
    except KeyboardInterrupt:
        time.sleep(0.3)
        file.write_text("saved")
        raise TrainingStopped("saved") from None


def work_in_a_grandchild(parent: Parent) -> None:
    with running_server(SLEEP, "TERM", 0.2) as process:
        parent.tell(process.pid)
        time.sleep(600)


@pytest.fixture
def child() -> Iterator[Callable[..., Child]]:
    """Start one that is ended with the test."""
    with ExitStack() as stack:

        def make(function: Callable[..., Any], *arguments: Any, **options: Any) -> Child:
            made = start(function, *arguments, name="test", **options)
            stack.callback(made.end)
            return made

        yield make


def next_news(child: Child) -> News:
    for _ in range(600):
        for _, news in listen([child]):
            return news
    raise AssertionError("nothing was heard")


def is_gone(pid: int) -> bool:
    for _ in range(300):
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.05)
    return False


def test_free_ports_differ_can_be_bound_and_are_taken_by_no_outgoing_connection() -> None:
    ports = free_ports(50)
    assert len(set(ports)) == 50
    first, _ = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    assert max(ports) < int(first)
    with ExitStack() as stack:
        for port in ports:
            stack.enter_context(socket.socket()).bind(("127.0.0.1", port))


def test_a_child_tells_answers_and_ends(child: Callable[..., Child]) -> None:
    made = child(add, 1, 2)
    assert next_news(made) == Told("adding")
    assert next_news(made) == Answered(3)
    assert made.ended
    assert is_gone(made.process.pid)
    assert run(add, 1, 2, name="test") == 3


def test_what_it_is_given_is_on_no_command_line_however_long(child: Callable[..., Child]) -> None:
    made = child(echo)
    made.tell("s3cret" * 100_000)
    assert next_news(made) == Told("s3cret" * 100_000)
    assert "s3cret" not in Path(f"/proc/{made.process.pid}/cmdline").read_text()
    assert run(_length, "s3cret" * 100_000, name="test") == 600_000


def _length(parent: Parent, text: str) -> int:
    return len(text)


def test_a_refusal_keeps_its_kind_and_its_sentence(child: Callable[..., Child]) -> None:
    news = next_news(child(refuse))
    assert isinstance(news, Refused)
    assert isinstance(news.error, TrainingStopped)
    with pytest.raises(TrainingStopped, match="stopped after step 3"):
        run(refuse, name="test")


def test_a_crash_says_where(child: Callable[..., Child], capfd: pytest.CaptureFixture[str]) -> None:
    news = next_news(child(crash, keep_output=True))
    assert isinstance(news, Died)
    assert "ZeroDivisionError: by nothing" in news.reason
    assert "the last thing it said" in news.reason
    assert "the last thing it said" in capfd.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_killed_child_is_told_of(child: Callable[..., Child], number: signal.Signals) -> None:
    made = child(hang)
    assert isinstance(next_news(made), Told)
    os.kill(made.process.pid, number)
    news = next_news(made)
    assert isinstance(news, Died)
    assert f"was killed by {number.name}" in news.reason
    with pytest.raises(UserError, match=r"^the process for test .*exit code 7"):
        run(_exit_with, 7, name="test")


def _exit_with(parent: Parent, code: int) -> None:
    os._exit(code)


def test_a_stopped_child_is_silent_and_one_that_works_is_not(
    child: Callable[..., Child], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "LOOK_S", 0.1)
    working, stopped = child(hang), child(hang)
    assert isinstance(next_news(working), Told)
    assert isinstance(next_news(stopped), Told)
    os.kill(stopped.process.pid, signal.SIGSTOP)
    looks = 0
    while stopped.silent_looks < 40:
        list(listen([working, stopped], 0.1))
        looks = max(looks, working.silent_looks)
    assert looks < 40


def test_a_flood_of_messages_from_one_hides_no_silence_of_another(child: Callable[..., Child]) -> None:
    talking, stopped = child(_talk), child(hang)
    assert isinstance(next_news(stopped), Told)
    os.kill(stopped.process.pid, signal.SIGSTOP)
    while stopped.silent_looks < 3:
        for speaker, _ in listen([talking, stopped]):
            assert speaker is talking
    assert talking.silent_looks == 0


def _talk(parent: Parent) -> None:
    while True:
        parent.tell("again")


def test_log_lines_come_to_the_parents_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "dflash_core"):
        run(warn, name="test")
    assert "mind the gap" in caplog.text


def test_an_interrupted_parent_lets_its_child_save(tmp_path: Path) -> None:
    def interrupt(told: str) -> None:
        assert told == "ready"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(save_when_interrupted, tmp_path / "file", name="test", on_told=interrupt, stop_timeout_s=60.0)
    assert (tmp_path / "file").read_text() == "saved"


def test_a_killed_parent_takes_its_children_and_theirs_along() -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLD], stdout=subprocess.PIPE)
    assert holder.stdout is not None
    grandchild, child = map(int, holder.stdout.readline().split())
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert is_gone(child)
    assert is_gone(grandchild)


def test_a_killed_parent_takes_a_stopped_child_along() -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLD], stdout=subprocess.PIPE)
    assert holder.stdout is not None
    _, child = map(int, holder.stdout.readline().split())
    os.kill(child, signal.SIGSTOP)
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert is_gone(child)


HOLD_FORKS = """
import time
from dflash_core import processes
from tests import test_processes
nursery = processes.Nursery(test_processes.prepare, "/dev/null", name="test", keep_for=9)
child = nursery.fork(test_processes.hang_with, name="fork")
while True:
    for _, news in processes.listen([nursery.child, child]):
        print(nursery.child.process.pid, child.process.pid, flush=True)
        time.sleep(600)
"""


def prepare(log: str) -> list[int]:
    with open(log, "a") as file:
        file.write(f"{os.getpid()}\n")
    return [os.getpid()]


def use(parent: Parent, prepared: list[int], more: int) -> tuple[int, int]:
    return prepared[0], more


def hang_with(parent: Parent, prepared: list[int]) -> None:
    parent.tell(os.getpid())
    time.sleep(600)


def refuse_to_prepare(kind: str) -> None:
    if kind == "refuse":
        raise TrainingStopped("nothing to prepare")
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture
def nursery(tmp_path: Path) -> Iterator[Nursery]:
    """One that forgets what it made after two forks, and logs who made it."""
    made = Nursery(prepare, str(tmp_path / "log"), name="test", keep_for=2)
    yield made
    made.end()


def test_a_nursery_prepares_once_until_it_forgets(nursery: Nursery, tmp_path: Path) -> None:
    answers = []
    for number in range(3):
        news = next_news(nursery.fork(use, number, name="fork"))
        assert isinstance(news, Answered)
        answers.append(news.value)
    pid = nursery.child.process.pid
    assert answers[:2] == [(pid, 0), (pid, 1)]
    assert answers[2][0] != pid, "made by the fork for itself"
    assert len((tmp_path / "log").read_text().split()) == 2


def test_a_fork_is_a_child_like_any_other(nursery: Nursery) -> None:
    hanging, killed = (nursery.fork(hang_with, name="fork") for _ in range(2))
    assert isinstance(next_news(hanging), Told)
    told = next_news(killed)
    assert isinstance(told, Told)
    os.kill(told.value, signal.SIGKILL)
    news = next_news(killed)
    assert isinstance(news, Died)
    assert "was killed by SIGKILL" in news.reason
    assert list(listen([hanging, nursery.child])) == []
    hanging.end()
    assert hanging.process.pid is not None
    assert is_gone(hanging.process.pid)


def test_the_end_of_a_nursery_ends_its_forks(nursery: Nursery) -> None:
    forks = [nursery.fork(hang_with, name="fork") for _ in range(2)]
    pids = [news.value for news in map(next_news, forks) if isinstance(news, Told)]
    nursery.end()
    assert all(map(is_gone, pids))
    assert all(fork.ended for fork in forks)


def test_forks_outlive_a_killed_nursery_until_it_is_ended(nursery: Nursery) -> None:
    fork = nursery.fork(hang_with, name="fork")
    told = next_news(fork)
    assert isinstance(told, Told)
    os.kill(nursery.child.process.pid, signal.SIGKILL)
    assert isinstance(next_news(nursery.child), Died)
    assert psutil.Process(told.value).is_running()
    assert isinstance(next_news(nursery.fork(hang_with, name="late")), Died)
    nursery.end()
    assert is_gone(told.value)


@pytest.mark.parametrize(("kind", "end"), [("refuse", Refused), ("die", Died)])
def test_a_nursery_that_cannot_prepare_says_why(kind: str, end: type[News]) -> None:
    nursery = Nursery(refuse_to_prepare, kind, name="test", keep_for=1)
    try:
        fork = nursery.fork(use, 1, name="fork")
        news = {one: next_news(one) for one in (nursery.child, fork)}
        assert isinstance(news[nursery.child], end)
        assert isinstance(news[fork], Died)
    finally:
        nursery.end()


def test_a_killed_parent_takes_a_nursery_and_its_forks_along() -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLD_FORKS], stdout=subprocess.PIPE)
    assert holder.stdout is not None
    nursery, fork = map(int, holder.stdout.readline().split())
    os.kill(fork, signal.SIGSTOP)
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert is_gone(nursery)
    assert is_gone(fork)


def test_a_server_is_stopped_as_asked_and_its_log_is_kept(tmp_path: Path) -> None:
    program = "trap 'echo bye; exit 0' TERM; echo hello; while :; do sleep 0.05; done"
    with running_server(["/bin/sh", "-c", program], "TERM", 20.0, tmp_path / "log") as process:
        while "hello" not in (tmp_path / "log").read_text():
            time.sleep(0.01)
    assert process.returncode == 0
    assert processes.last_words(tmp_path / "log") == "hello | bye"
