"""The demo's recipe on a bucket of its own, with the prompts of its bad file, for generation by a real server."""

from pathlib import Path

from demo.files import prompts_of_bad_file
from dflash_core.recipe import Recipe, load_recipe
from dflash_core.workspace import Workspace

REPOSITORY = Path(__file__).resolve().parent.parent
TARGET = REPOSITORY / "demo/target"


def served_recipe(url: str, model: str, bucket: str, work_dir: Path) -> Recipe:
    """For the server at this base URL, which serves the demo's target under this name."""
    demo = load_recipe(REPOSITORY / "recipes/demo.toml")
    assert demo.generation is not None
    prompts = demo.generation.prompts.model_copy(update={"bucket": bucket})
    section = {"servers": (url,), "model": model, "prompts": prompts}
    storage = {"bucket": bucket, "work_dir": work_dir, "embedded_store": None}
    return demo.model_copy(
        update={
            "source": demo.source.model_copy(update={"bucket": bucket}),
            "storage": demo.storage.model_copy(update=storage),
            "target": demo.target.model_copy(update={"path": TARGET}),
            "generation": demo.generation.model_copy(update=section),
        }
    )


def put_prompts(workspace: Workspace, count: int) -> None:
    """The first prompts of the demo's bad file."""
    assert workspace.prompts is not None
    workspace.prompts.put("part-03.jsonl", b"".join(prompts_of_bad_file().splitlines(keepends=True)[:count]))
