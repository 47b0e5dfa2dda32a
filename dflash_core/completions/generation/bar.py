"""The progress bar of a generation at a terminal: tokens/s, requests in flight, time left, cost."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

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

        def show(now: Progress) -> None:
            eta = "" if now.eta_s is None else f"{timedelta(seconds=round(now.eta_s))} left, "
            bar.update(task, completed=now.share, description=eta + now.text())

        yield show
