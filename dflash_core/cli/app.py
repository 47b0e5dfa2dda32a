"""What every command shares: the options, the recipe, the bar, how a refusal is told."""

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

from dflash_core.errors import UserError
from dflash_core.recipe import Recipe, load_recipe
from dflash_core.records import CommandFailure, Record

HELP = """`dflash`: every asset's twin at the terminal. The same core call, a progress bar, no Dagster.

    generate -> verify -> tokenize -> freeze -> train -> evaluate -> export
    (and inspect: any row, its mask in colour; serve-check: the same acceptance from a server; diagnose: why it is low)

Results go to standard output, progress and refusals to standard error; a refusal is one sentence and exit code 2.
Heavy imports happen inside the commands, so that `--help` and the data commands never wait for torch.
"""

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, add_completion=False, help=HELP)
errors = Console(stderr=True, highlight=False, soft_wrap=True, markup=False)

RecipeOption = Annotated[Path, typer.Option("--recipe", envvar="DFLASH_RECIPE", help="the recipe, a TOML file")]
DrafterArgument = Annotated[str | None, typer.Argument(metavar="[DRAFTER]", help="a training run; default: the latest")]
ResultOption = Annotated[Path | None, typer.Option("--result", help="write the result, or the refusal, here as JSON")]
at_exit = ExitStack()
DEFAULT_RECIPE = Path("recipes/demo.toml")


def open_recipe(path: Path) -> Recipe:
    """The recipe, and until this command ends the embedded store if the recipe asks for it."""
    from dflash_core.storage.embedded import store_of

    recipe = load_recipe(path)
    at_exit.enter_context(store_of(recipe))
    return recipe


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[int, int], None]]:
    """A bar with ETA on standard error, moved by (done, total)."""
    columns = (SpinnerColumn(), TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as progress:
        task = progress.add_task("", total=total)
        yield lambda done, total: progress.update(task, completed=done, total=total)


@contextmanager
def answering(result: Path | None) -> Iterator[Callable[[Record], None]]:
    """Gives a function that writes the result for a caller that is a program; a refusal is written, too."""
    from dflash_core.training.agent import die_with_parent

    def answer(record: Record) -> None:
        if result is not None:
            result.write_text(record.model_dump_json())

    if result is not None:
        die_with_parent()  # a killed run must not leave its evaluation on the GPU
    try:
        yield answer
    except UserError as error:
        answer(CommandFailure(error=str(error)))
        raise


def main() -> None:
    """Entry point: a UserError is one sentence and an exit code; SIGTERM unwinds, so servers stop."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        with at_exit:
            app()
    except UserError as error:
        errors.print(f"error: {error}", style="red")
        sys.exit(error.exit_code)
    except OSError as error:
        errors.print(f"error: {error}; check the path, its permissions and the disk space", style="red")
        sys.exit(UserError.exit_code)
