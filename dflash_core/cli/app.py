"""What every command shares: the options, the workspace, how a refusal is told."""

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console, RenderableType

from dflash_core.errors import UserError
from dflash_core.records import Record

if TYPE_CHECKING:
    from dflash_core.workspace import Workspace

HELP = """`dflash`: every asset's twin at the terminal. The same core call, a progress bar, no Dagster.

    generate -> verify -> tokenize -> freeze -> train -> evaluate -> export
    (and rows: which rows are like this; inspect: any row, its mask in colour; serve-check: the same acceptance from a
    server; diagnose: why it is low)

Results go to standard output, progress and refusals to standard error; a refusal is one sentence and exit code 2.
Heavy imports happen inside the commands, so that `--help` and the data commands never wait for torch.
"""

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, add_completion=False, help=HELP)
output = Console(highlight=False, soft_wrap=True)
errors = Console(stderr=True, highlight=False, soft_wrap=True, markup=False)

RecipeOption = Annotated[Path, typer.Option("--recipe", envvar="DFLASH_RECIPE", help="the recipe, a TOML file")]
DrafterArgument = Annotated[str | None, typer.Argument(metavar="[DRAFTER]", help="a training run; default: the latest")]
ResultOption = Annotated[Path | None, typer.Option("--result", help="write the result, or the refusal, here as JSON")]
at_exit = ExitStack()
DEFAULT_RECIPE = Path("recipes/demo.toml")
ANY_WIDTH = 100_000


def open_recipe(path: Path) -> "Workspace":
    """The recipe and its stores, and until this command ends the embedded store if the recipe asks for it."""
    from dflash_core.workspace import open_workspace

    return at_exit.enter_context(open_workspace(path))


def show(what: RenderableType) -> None:
    """Print a tree or a table: within the width of the terminal, or as wide as it is where there is no terminal."""
    width = None if output.is_terminal else ANY_WIDTH
    Console(highlight=False, width=width).print(what)


@contextmanager
def answering(result: Path | None) -> Iterator[Callable[[Record], None]]:
    """Gives a function that writes the result for a caller that is a program; a refusal is written, too."""
    import json

    from dflash_core.local_files import write_whole

    def answer(record: Record) -> None:
        if result is not None:
            write_whole(result, record.model_dump_json())

    try:
        yield answer
    except UserError as error:
        if result is not None:
            write_whole(result, json.dumps({"error": str(error)}))
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
