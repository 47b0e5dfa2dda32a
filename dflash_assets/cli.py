"""The commands that need Dagster, besides the core's: `dflash dev`, `dflash status`, `dflash partitions`."""

import sys
from typing import Annotated

import typer

from dflash_core.cli import DEFAULT_RECIPE, RecipeOption, app, main, open_recipe
from dflash_core.errors import UserError

__all__ = ["main"]

partitions = typer.Typer(no_args_is_help=True, help="The partitions of this Dagster instance.")
app.add_typer(partitions, name="partitions")


@app.command()
def dev(
    recipe: RecipeOption = DEFAULT_RECIPE,
    port: Annotated[int, typer.Option(help="of the UI, on 127.0.0.1")] = 3000,
) -> None:
    """The Dagster UI on 127.0.0.1, with the embedded store if the recipe asks for it."""
    from dflash_assets.dev import serve

    serve(recipe, port)


@app.command()
def status(recipe: RecipeOption = DEFAULT_RECIPE) -> None:
    """Partitions by state, failures with their reasons, quarantined files, the last runs."""
    from rich.console import Console

    from dflash_assets.dev import local_instance
    from dflash_assets.status import read_status, render

    Console(highlight=False).print(render(read_status(local_instance(), open_recipe(recipe))))


@partitions.command()
def sync(recipe: RecipeOption = DEFAULT_RECIPE) -> None:
    """Make every source file a partition of the instance in this folder."""
    from dflash_assets.dev import local_instance
    from dflash_assets.partitions import sync_partitions

    synced = sync_partitions(local_instance(), open_recipe(recipe))
    print(f"{len(synced.sources)} files, {len(synced.added)} new partitions, {len(synced.vanished)} without a file")
    for partition in synced.vanished:
        print(f"vanished: {partition}", file=sys.stderr)


@partitions.command()
def release(
    keys: Annotated[
        list[str] | None, typer.Argument(metavar="KEY", help="keys, patterns (part-0*) or ranges (A..B)")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="whatever is quarantined")] = False,
    recipe: RecipeOption = DEFAULT_RECIPE,
) -> None:
    """Let quarantined partitions be tried again, with a fresh count."""
    from dflash_assets.dev import local_instance
    from dflash_assets.quarantine import release_files

    if not keys and not every:
        raise UserError("name what to release: keys, patterns (part-0*), ranges (FIRST..LAST), or --all")
    released = release_files(local_instance(), open_recipe(recipe), [] if every else keys or [])
    for key in released:
        print(f"released: {key}")
    if not released:
        print("nothing is quarantined")


if __name__ == "__main__":
    main()
