"""The progress bar of a generation at a terminal: tokens/s, requests in flight, time left, cost."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TaskProgressColumn, TextColumn
from rich.progress import Progress as Bar

from dflash_core.completions.generation.progress import Progress


@contextmanager
def generation_bar(console: Console) -> Iterator[Callable[[Progress], None]]:
    """Gives what moves the bar; without a terminal nothing is drawn."""
    seen = (BarColumn(), TaskProgressColumn(), TextColumn("{task.description}"))
    columns = (SpinnerColumn(), TextColumn("generate"), *seen)
    with Bar(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=1.0)

        yield lambda now: bar.update(task, completed=now.share, description=now.text())
