"""Starts training as processes: `python -m dflash_core.training.launch --recipe R`, for the CLI and the asset layer.

One drafter trains in this process, several in one process each (`ranks`). The trade-off of a process of its own:
seconds of imports, for a crash or an out-of-memory kill that takes nobody else along.
Exit codes: 0 done, 2 refused (one sentence says why), 75 stopped with a checkpoint saved, anything else: a crash.
"""

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from dflash_core.errors import UserError
from dflash_core.recipe import Recipe, load_recipe
from dflash_core.records import CommandFailure, DrafterCheckpoint, Record
from dflash_core.storage.embedded import store_of
from dflash_core.training.agent import die_with_parent
from dflash_core.training.progress import log_to_stderr, report_steps
from dflash_core.training.ranks import Job, RanksDied, stop_on_signals, train_in_ranks, write_whole
from dflash_core.training.run import train_drafter
from dflash_core.training.trainer import StopRequest

log = logging.getLogger(__name__)


def main(arguments: Sequence[str] | None = None) -> int:
    """Train as the arguments say; returns the exit code."""
    options = _parse(arguments)
    log_to_stderr()
    if options.pipes:
        die_with_parent()
    try:
        recipe = load_recipe(options.recipe)
        with store_of(recipe):
            checkpoint = _train(recipe, options)
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
    parser = argparse.ArgumentParser(prog="python -m dflash_core.training.launch", description=__doc__)
    parser.add_argument("--recipe", type=Path, required=True)
    parser.add_argument("--training-set", help="hash; default: the one frozen last")
    parser.add_argument("--accept-failed-gate", action="store_true", help="recorded in the checkpoint")
    parser.add_argument("--result", type=Path, help="write the checkpoint's record, or the refusal, here as JSON")
    parser.add_argument("--pipes", action="store_true", help="report to the Dagster run that started this process")
    return parser.parse_args(arguments)


def _train(recipe: Recipe, options: argparse.Namespace) -> DrafterCheckpoint:
    what = Job(options.recipe, options.training_set, options.accept_failed_gate, options.pipes)
    if len(recipe.training.placement.drafters) > 1:
        return train_in_ranks(recipe, what)
    stop = StopRequest()
    with stop_on_signals(stop), report_steps(options.pipes) as report:
        return train_drafter(recipe, what.training_set, what.accept_failed_gate, report, stop)


def _answer(result: Path | None, record: Record) -> None:
    if result is not None:
        write_whole(result, record.model_dump_json())


if __name__ == "__main__":
    sys.exit(main())
