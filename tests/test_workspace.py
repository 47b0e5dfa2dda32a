"""A workspace is opened once at the border, past the environment where it says more; a child process opens its own."""

import os
import pickle
from pathlib import Path

import pytest

from dflash_core.errors import RecipeError, StorageError
from dflash_core.recipe import Recipe, SourceSettings, StorageSettings, TargetSettings, load_recipe
from dflash_core.storage.s3 import NOTHING_SAID, Access
from dflash_core.workspace import Workspace, connect, open_workspace

GENERATION = """
[generation]
prompts = { bucket = "B", prefix = "prompts/" }
servers = ["http://127.0.0.1:8000/v1"]
model = "tiny"
"""


@pytest.fixture
def recipe(bucket: str, tmp_path: Path) -> Recipe:
    return Recipe(
        name="test",
        source=SourceSettings(bucket=bucket, prefix="in/"),
        storage=StorageSettings(bucket=bucket, prefix="out/", work_dir=tmp_path / "work", attempts=3),
        target=TargetSettings(path=Path("unused")),
    )


def places(workspace: Workspace) -> list[tuple[str, str, int] | None]:
    stores = (workspace.source, workspace.derived, workspace.prompts)
    return [None if store is None else (store.bucket, store.prefix, store.attempts) for store in stores]


def test_the_stores_are_those_of_the_recipe_over_one_client(recipe: Recipe, bucket: str) -> None:
    workspace = connect(recipe)
    assert places(workspace) == [(bucket, "in/", 3), (bucket, "out/", 3), None]
    assert workspace.source.client is workspace.derived.client
    workspace.source.put("a", b"x")
    assert [listed.key for listed in connect(recipe).source.list()] == ["a"]


def test_prompts_have_a_store_where_the_recipe_generates(tmp_path: Path, bucket: str) -> None:
    path = tmp_path / "recipe.toml"
    text = (
        f'name = "x"\n[source]\nbucket = "{bucket}"\nprefix = "in/"\n[storage]\nbucket = "{bucket}"\nprefix = "out/"\n'
    )
    path.write_text(text + '[target]\npath = "unused"\n' + GENERATION.replace('"B"', f'"{bucket}"'))
    assert places(connect(load_recipe(path)))[2] == (bucket, "prompts/", 5)


def test_a_pickled_workspace_is_opened_again_with_the_same_access(recipe: Recipe, access: Access) -> None:
    workspace = connect(recipe, access)
    again: Workspace = pickle.loads(pickle.dumps(workspace))
    assert (again.recipe, again.access, places(again)) == (recipe, access, places(workspace))
    assert again.source.client is not workspace.source.client
    workspace.derived.put("a", b"x")
    assert again.derived.get("a").body == b"x"


def test_what_the_access_says_is_used_and_the_environment_is_not(
    recipe: Recipe, access: Access, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in access.environment():
        monkeypatch.setenv(name, "wrong")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    connect(recipe, access).derived.put("a", b"x")
    nowhere = recipe.model_copy(update={"storage": recipe.storage.model_copy(update={"attempts": 1})})
    with pytest.raises(StorageError, match="check the endpoint"):
        connect(nowhere, NOTHING_SAID).derived.get("a")


def test_no_secret_is_shown(access: Access) -> None:
    assert access.secret_key is not None
    assert access.secret_key not in repr(access)


def test_the_scratch_folder_is_made_or_named(recipe: Recipe, tmp_path: Path) -> None:
    workspace = connect(recipe)
    assert workspace.make_work_dir("rows") == tmp_path / "work/rows"
    assert (tmp_path / "work/rows").is_dir()
    (tmp_path / "file").write_text("")
    blocked = recipe.model_copy(update={"storage": recipe.storage.model_copy(update={"work_dir": tmp_path / "file"})})
    with pytest.raises(StorageError, match=r"storage\.work_dir .*file cannot be used: .*; set another one"):
        connect(blocked).make_work_dir("rows")


def test_an_embedded_store_runs_while_the_workspace_is_open_and_the_environment_stays(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(
        'name = "x"\n[source]\nbucket = "one"\n[storage]\nbucket = "two"\n'
        f'embedded_store = "{tmp_path}/store"\n[target]\npath = "unused"\n'
    )
    before = dict(os.environ)
    with open_workspace(path) as workspace:
        assert dict(os.environ) == before
        workspace.source.put("a", b"x")
        assert list(workspace.derived.list()) == []
        child: Workspace = pickle.loads(pickle.dumps(workspace))
        assert child.source.get("a").body == b"x"
    with pytest.raises(StorageError):
        child.source.get("a")


def test_a_recipe_that_cannot_be_used_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="does not exist"), open_workspace(tmp_path / "nowhere.toml"):
        pass
