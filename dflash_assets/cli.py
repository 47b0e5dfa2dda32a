"""The commands that need Dagster, beside the core's: `dflash dev`, `dflash status`, `dflash partitions`."""

import sys
from typing import Annotated

import typer

from dflash_core.cli import DEFAULT_RECIPE, RecipeOption, app, main, open_recipe

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
def release(keys: Annotated[list[str], typer.Argument(metavar="KEY...")]) -> None:
    """Let quarantined partitions be tried again, with a fresh count."""
    from dflash_assets.dev import local_instance
    from dflash_assets.quarantine import release as release_partition

    instance = local_instance()
    for key in keys:
        release_partition(instance, key)
        print(f"released: {key}")


if __name__ == "__main__":
    main()
