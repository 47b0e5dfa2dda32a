"""What every command, asset and child process works in: one recipe and the stores it names, opened once at the border.

Below the border nobody reads the environment, loads a recipe or makes a client; functions take the workspace, or just
the part of it that they read. A workspace can be pickled: whoever unpickles it, in a child process, opens it there
with a client of its own.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dflash_core.errors import StorageError
from dflash_core.recipe import Recipe, SourceSettings, load_recipe
from dflash_core.storage.embedded import embedded_store, ensure_bucket
from dflash_core.storage.s3 import NOTHING_SAID, Access, Store, make_client


@dataclass(frozen=True)
class Workspace:
    """A recipe, the access it is used with, and its places in the object store, over one client."""

    recipe: Recipe
    access: Access
    source: Store
    """Completions."""
    derived: Store
    """Everything made from them."""
    prompts: Store | None
    """Where the recipe generates completions."""

    def __reduce__(self) -> "tuple[object, tuple[Recipe, Access]]":
        return connect, (self.recipe, self.access)

    @property
    def work_dir(self) -> Path:
        """Local scratch."""
        return self.recipe.storage.work_dir

    def make_work_dir(self, name: str) -> Path:
        """A folder of the local scratch.

        Raises:
            StorageError: it cannot be made.
        """
        folder = self.work_dir / name
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(f"storage.work_dir {self.work_dir} cannot be used: {error}; set another one") from None
        return folder


def connect(recipe: Recipe, access: Access = NOTHING_SAID) -> Workspace:
    """Open the stores of a recipe, with what boto3 finds by itself where neither recipe nor `access` say it.

    Raises:
        RecipeError: an address that is never talked to.
        StorageError: a client cannot be made.
    """
    client, attempts = make_client(recipe.storage, access), recipe.storage.attempts

    def store(place: SourceSettings) -> Store:
        return Store(client, place.bucket, place.prefix, attempts)

    derived = Store(client, recipe.storage.bucket, recipe.storage.prefix, attempts)
    prompts = None if recipe.generation is None else store(recipe.generation.prompts)
    return Workspace(recipe, access, store(recipe.source), derived, prompts)


@contextmanager
def open_workspace(recipe_file: Path) -> Iterator[Workspace]:
    """Load a recipe and open its stores; while the context lasts the embedded store runs, if the recipe asks for it.

    Raises:
        RecipeError: the recipe cannot be used.
        StorageError: the embedded store does not come up.
    """
    recipe = load_recipe(recipe_file)
    folder = recipe.storage.embedded_store
    if folder is None:
        yield connect(recipe)
        return
    with embedded_store(folder) as access:
        for bucket in sorted({recipe.source.bucket, recipe.storage.bucket}):
            ensure_bucket(bucket, access)
        yield connect(recipe, access)
