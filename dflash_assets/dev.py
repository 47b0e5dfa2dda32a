"""The Dagster UI and daemon on this machine, with the recipe's embedded store: what `make dev` and the demo run on."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import dagster as dg

from dflash_assets.graphql import Dagster
from dflash_assets.partitions import sync_partitions
from dflash_core.errors import StorageError, UserError
from dflash_core.local_files import locked
from dflash_core.processes import free_ports, last_words, running_server
from dflash_core.storage.s3 import Access
from dflash_core.workspace import open_workspace

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 120.0
"""For files under way; what has not ended then is killed, and run again at the next start."""
CHECKPOINT_TIMEOUT_S = 130.0
STATE = Path(".dflash")
GPU_ASSETS = frozenset({"drafter_checkpoint", "drafter_eval"})
SENSORS = ("new_completion_files", "nightly_stages", "tell_of_failed_runs")
SCHEDULES = ("rerun_failed_files", "nightly_lineage")


def serve(recipe: Path, port: int) -> None:
    """Run until interrupted; every source file is a partition from the start.

    Raises:
        UserError: the recipe, its store or Dagster do not come up.
    """
    with open_workspace(recipe) as workspace:
        try:
            sync_partitions(local_instance(), workspace)
        except StorageError as error:
            print(f"no partitions yet: {error}", file=sys.stderr)
        _serve(recipe, port, workspace.access)


def local_instance() -> dg.DagsterInstance:
    """The instance of the dagster.yaml in this folder.

    Raises:
        UserError: there is none.
    """
    if not Path("dagster.yaml").exists():
        raise UserError(f"no dagster.yaml in {Path.cwd()}; run this in the folder of the project")
    return dg.DagsterInstance.from_config(str(Path.cwd()))


def _serve(recipe: Path, port: int, access: Access) -> None:
    with _running(recipe, port, access, log=None) as (ui, process):
        ui.wait_until_loaded()
        switch_on(ui)
        print(f"\n  Dagster UI: {ui.url}\n  Ctrl-C stops it; its state stays in .dflash/\n", flush=True)
        try:
            code = process.wait()
        except KeyboardInterrupt:
            print("stopping; training saves a checkpoint first", flush=True)
        else:
            raise UserError(f"Dagster ended by itself with exit code {code}; its last lines are above; start it again")


def switch_on(ui: Dagster) -> None:
    """Start what runs by itself, except what somebody has started or stopped in this instance before."""
    touched = {state.name for state in local_instance().all_instigator_state()}
    ui.switch_on([name for name in SENSORS if name not in touched], [name for name in SCHEDULES if name not in touched])


@contextmanager
def dagster_ui(recipe: Path, port: int, access: Access, log: Path | None) -> Iterator[Dagster]:
    """Webserver and daemon on 127.0.0.1.

    Args:
        recipe: of the code location.
        port: of the UI; another where it is taken.
        access: to the object store, for Dagster and everything that it starts.
        log: gets the output; None: this terminal.

    Raises:
        UserError: Dagster runs in this folder already, ends before it answers, or does not answer in time.
    """
    with _running(recipe, port, access, log) as (ui, _):
        yield ui


@contextmanager
def _running(
    recipe: Path, port: int, access: Access, log: Path | None
) -> "Iterator[tuple[Dagster, subprocess.Popen[bytes]]]":
    STATE.mkdir(exist_ok=True)
    running = UserError(f"Dagster already runs in {Path.cwd()}; stop it first")
    with locked(STATE / "dagster.lock", running) as lock:
        ui = Dagster(f"http://127.0.0.1:{_free(port)}")
        # -W: `dagster dev` warns that `dg dev` supersedes it, which needs a project of another form.
        dagster = [sys.executable, "-W", "ignore:Function", "-m", "dagster"]
        # -w: without it a pyproject.toml in this folder would name the code location, and name it otherwise.
        command = [*dagster, "dev", "-w", "workspace.yaml", "-h", "127.0.0.1", "-p", ui.url.rpartition(":")[2]]
        environment: dict[str, str | None] = {
            "DAGSTER_HOME": str(Path.cwd()),
            "DFLASH_RECIPE": str(recipe.resolve()),
        }
        if access.is_complete:  # then no profile, token or endpoint of the user's own gets in
            environment |= dict.fromkeys(name for name in os.environ if name.startswith("AWS_"))
        environment |= access.environment()
        with running_server(command, "INT", STOP_TIMEOUT_S, log, environment, (lock,)) as process:
            deadline = time.monotonic() + START_TIMEOUT_S
            while not ui.answers():
                if process.poll() is not None or time.monotonic() > deadline:
                    words = "" if log is None else ": " + last_words(log)
                    raise UserError(f"the Dagster UI did not come up at {ui.url}{words}")
                time.sleep(0.2)
            ui.ask("mutation { setNuxSeen }")  # no newsletter dialog before the first look
            try:
                yield ui, process
            finally:
                if process.poll() is None:
                    _end_training(ui)


def _end_training(ui: Dagster) -> None:
    """Terminate what holds the GPU, and wait until it has saved; Dagster itself would be killed before."""
    deadline = time.monotonic() + CHECKPOINT_TIMEOUT_S
    asked: set[str] = set()
    try:
        while time.monotonic() < deadline:
            runs = {run.run for run in ui.started_runs() if run.job == "drafter_job" or run.assets & GPU_ASSETS}
            if not runs:
                return
            if runs - asked:
                ui.terminate(sorted(runs - asked))
                asked |= runs
            time.sleep(0.5)
    except UserError as error:
        print(f"training could not be asked to save a checkpoint: {error}", file=sys.stderr)


def _free(port: int) -> int:
    """This port, or any other where it is taken."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return free_ports(1)[0]
        return int(probe.getsockname()[1])
