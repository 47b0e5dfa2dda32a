"""The rules that keep the tree readable: who may import whom, one noun everywhere, the README's tree."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
STAGES = ("storage", "completions", "quality", "tokenization", "batches", "drafter", "training", "evaluation")
WITHOUT_TORCH = STAGES[:4]
BELOW_THE_STAGES = ("errors", "recipe", "records", "supervised")
PIPES = REPOSITORY / "dflash_core/training/progress.py"


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module or "")
    return found


def files(package: str) -> list[Path]:
    return sorted((REPOSITORY / package).rglob("*.py"))


@pytest.mark.parametrize("path", files("dflash_core"), ids=str)
def test_the_core_knows_nothing_of_dagster(path: Path) -> None:
    found = {name for name in imports(path) if name.split(".")[0].startswith("dagster")}
    assert found <= {"dagster_pipes"}
    assert not found or path == PIPES


@pytest.mark.parametrize("path", files("dflash_assets"), ids=str)
def test_the_asset_layer_imports_neither_torch_nor_future_annotations(path: Path) -> None:
    assert not {name for name in imports(path) if name.split(".")[0] in ("torch", "transformers", "__future__")}


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_imports_only_earlier_ones(stage: str) -> None:
    allowed = {*STAGES[: STAGES.index(stage) + 1], *BELOW_THE_STAGES}
    for path in files(f"dflash_core/{stage}"):
        used = {name.split(".")[1] for name in imports(path) if name.startswith("dflash_core.")}
        assert used <= allowed, f"{path.relative_to(REPOSITORY)} imports {sorted(used - allowed)}"


def test_the_data_half_runs_without_torch() -> None:
    modules = [
        ".".join(path.relative_to(REPOSITORY).with_suffix("").parts)
        for stage in WITHOUT_TORCH
        for path in files(f"dflash_core/{stage}")
        if path.stem != "__init__"
    ]
    program = (
        f"import sys, importlib; [importlib.import_module(m) for m in {modules!r}]; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_no_open_signatures() -> None:
    for path in files("dflash_core") + files("dflash_assets"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.args.kwarg:
                assert node.name == "ask", f"{path.relative_to(REPOSITORY)}:{node.lineno} takes **{node.args.kwarg.arg}"


def test_the_readme_tree_is_the_tree() -> None:
    readme = (REPOSITORY / "README.md").read_text(encoding="utf8")
    tree = re.search(r"```text\n(.*?)```", readme, re.DOTALL)
    assert tree is not None
    named = re.findall(r"^([\w./-]+/?)\s{2,}", tree.group(1), re.MULTILINE)
    assert named
    for name in named:
        assert (REPOSITORY / name).exists(), f"README names {name}, which does not exist"
    packages = {f"dflash_core/{stage}/" for stage in STAGES}
    assert packages <= set(named)
    assert {f"dflash_assets/{path.name}" for path in files("dflash_assets") if path.stem != "__init__"} <= set(named)


def test_no_address_and_no_path_of_a_machine() -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    forbidden = re.compile("/" + "(work|root|home)/" + r"|files\.python" + r"hosted|pypi\." + r"org/simple")
    for name in tracked.splitlines():
        path = REPOSITORY / name
        if path.suffix in (".py", ".md", ".toml", ".yaml", ".lock", "") and path.is_file():
            match = forbidden.search(path.read_text(encoding="utf8", errors="replace"))
            assert match is None, f"{name}: {match}"
