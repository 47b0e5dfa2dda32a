"""What the training process does (`dflash_core.train`), for the CLI and the asset layer.

One drafter trains in this process, several in one process each (`ranks`), which are this program again. The trade-off
of a process of its own: seconds of imports, for a crash or an out-of-memory kill that takes nobody else along.
Exit codes: 0 done, 2 refused (one sentence says why), 75 stopped with a checkpoint saved, anything else: a crash.
"""

import argparse
import logging
from collections.abc import Sequence
from pathlib import Path

from dflash_core.errors import UserError
from dflash_core.recipe import Recipe, load_recipe
from dflash_core.records import CommandFailure, DrafterCheckpoint, Record
from dflash_core.storage.embedded import store_of
from dflash_core.training.agent import die_with_parent
from dflash_core.training.probing import MakeProbe
from dflash_core.training.progress import log_to_stderr
from dflash_core.training.ranks import (
    Job,
    RanksDied,
    Session,
    run_rank,
    stop_on_signals,
    train_in_ranks,
    watching,
    write_whole,
)
from dflash_core.training.run import train_drafter
from dflash_core.training.trainer import StopRequest

log = logging.getLogger(__name__)


def launch(arguments: Sequence[str] | None, make_probe: MakeProbe | None = None) -> int:
    """Train as the arguments say; returns the exit code.

    Args:
        arguments: None: the process's own.
        make_probe: see `train_drafter`.
    """
    options = _parse(arguments)
    log_to_stderr()
    if options.session is not None:
        return run_rank(_job(options), Session(options.session), make_probe)
    if options.pipes:
        die_with_parent()
    try:
        recipe = load_recipe(options.recipe)
        with store_of(recipe):
            checkpoint = _train(recipe, options, make_probe)
    except RanksDied as error:
        log.error("%s", error)
        return 1
    except UserError as error:
        _answer(options.result, CommandFailure(error=str(error)))
        log.error("%s", error)
        return error.exit_code
    _answer(options.result, checkpoint)
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m dflash_core.train", description=__doc__)
    parser.add_argument("--recipe", type=Path, required=True)
    parser.add_argument("--training-set", help="hash; default: the one frozen last")
    parser.add_argument("--accept-failed-gate", action="store_true", help="recorded in the checkpoint")
    parser.add_argument("--result", type=Path, help="write the checkpoint's record, or the refusal, here as JSON")
    parser.add_argument("--pipes", action="store_true", help="report to the Dagster run that started this process")
    parser.add_argument("--profile", action="store_true", help="write a trace of a few steps below storage.work_dir")
    parser.add_argument("--session", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def _job(options: argparse.Namespace) -> Job:
    return Job(options.recipe, options.training_set, options.accept_failed_gate, options.pipes, options.profile)


def _train(recipe: Recipe, options: argparse.Namespace, make_probe: MakeProbe | None) -> DrafterCheckpoint:
    what = _job(options)
    if len(recipe.training.placement.drafters) > 1:
        return train_in_ranks(recipe, what)
    stop = StopRequest()
    with stop_on_signals(stop), watching(recipe, what, lead=True) as report:
        return train_drafter(recipe, what.training_set, what.accept_failed_gate, report, stop, make_probe)


def _answer(result: Path | None, record: Record) -> None:
    if result is not None:
        write_whole(result, record.model_dump_json())
