"""The commands of the drafter: train, evaluate, diagnose, export, serve-check, lineage."""

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from dflash_core.cli.app import (
    DEFAULT_RECIPE,
    DrafterArgument,
    RecipeOption,
    ResultOption,
    answering,
    app,
    errors,
    open_recipe,
    progress,
)
from dflash_core.records import ServeCheck

LINEAGE_FILES = 20


@app.command()
def train(
    recipe: RecipeOption = DEFAULT_RECIPE,
    training_set: Annotated[str | None, typer.Option(help="hash; default: the latest")] = None,
    accept_failed_gate: Annotated[
        bool, typer.Option("--accept-failed-gate", help="recorded in the checkpoint")
    ] = False,
    profile: Annotated[bool, typer.Option("--profile", help="write a trace of a few steps")] = False,
) -> None:
    """drafter_checkpoint: train, or continue, the drafter of a training set."""
    from dflash_core.train import main as launch

    open_recipe(recipe)
    arguments = ["--recipe", str(recipe)]
    arguments += ["--training-set", training_set] if training_set else []
    arguments += ["--accept-failed-gate"] if accept_failed_gate else []
    arguments += ["--profile"] if profile else []
    raise typer.Exit(launch(arguments))


@app.command()
def evaluate(
    drafter: DrafterArgument = None, recipe: RecipeOption = DEFAULT_RECIPE, result: ResultOption = None
) -> None:
    """drafter_eval: acceptance length by draft-and-verify decoding on held-out prompts."""
    with answering(result) as answer:
        from dflash_core.evaluation.evaluate import evaluate_drafter

        settings = open_recipe(recipe)
        with progress("evaluate", settings.evaluation.prompts) as advance:
            report = evaluate_drafter(settings, drafter, advance)
        answer(report)
    from dflash_core.evaluation.markdown import to_terminal
    from dflash_core.storage.store import open_stores

    picture = open_stores(settings).derived.uri(report.picture.key)
    Console(highlight=False, soft_wrap=True).print(to_terminal(report, picture))


@app.command()
def diagnose(
    drafter: Annotated[
        str | None,
        typer.Argument(metavar="[DRAFTER]", help="a training run, or a drafter folder; default: the latest run"),
    ] = None,
    recipe: RecipeOption = DEFAULT_RECIPE,
    json: Annotated[Path | None, typer.Option(help="write the diagnosis here, too")] = None,
) -> None:
    """Why is acceptance low when served? Tries the known causes one by one on held-out rows.

    A folder that exists, or anything with a slash, is a drafter folder as it is served; any other word is a run.
    """
    from dflash_core.evaluation.diagnose.diagnose import diagnose as diagnose_drafter
    from dflash_core.evaluation.diagnose.table import to_terminal

    folder = Path(drafter) if drafter is not None and ("/" in drafter or Path(drafter).is_dir()) else None
    with progress("diagnose", 5) as advance:
        found = diagnose_drafter(open_recipe(recipe), drafter if folder is None else None, folder, advance)
    if json is not None:
        json.write_text(found.model_dump_json(indent=1) + "\n", encoding="utf8")
    Console(highlight=False).print(to_terminal(found))


@app.command()
def export(
    drafter: DrafterArgument = None,
    recipe: RecipeOption = DEFAULT_RECIPE,
    result: ResultOption = None,
    verify: Annotated[bool, typer.Option("--verify", help="only read every exported byte again")] = False,
) -> None:
    """drafter_export: the folder that serving engines load."""
    with answering(result) as answer:
        from dflash_core.drafter.export import export_drafter, verify_export

        settings = open_recipe(recipe)
        exported = verify_export(settings, drafter) if verify else export_drafter(settings, drafter)
        answer(exported)
    print(f"{exported.run}: {'whole: ' if verify else ''}{', '.join(f.key for f in exported.files)}")


@app.command("serve-check")
def serve_check_command(
    drafter: DrafterArgument = None,
    recipe: RecipeOption = DEFAULT_RECIPE,
    url: Annotated[str | None, typer.Option(help="a running server with the exported drafter")] = None,
    plain_url: Annotated[str | None, typer.Option(help="one without, whose tokens are compared, too")] = None,
    model: Annotated[str | None, typer.Option(help="the served name; default: the only one")] = None,
    vllm_python: Annotated[Path | None, typer.Option(help="python with vLLM: start it here, without --url")] = None,
    prompts: Annotated[int, typer.Option(min=1, help="held-out prompts")] = 16,
    result: ResultOption = None,
) -> None:
    """What a server accepts of an exported drafter, beside what our own decoder accepts on the same prompts."""
    with answering(result) as answer:
        from dflash_core.evaluation.serve_check import Question, serve_check

        settings = open_recipe(recipe)
        question = Question(url, plain_url, model, vllm_python, prompts)
        with progress("serve-check", 2 * prompts) as advance:
            check = serve_check(settings, drafter, question, advance)
        answer(check)
    _print_check(check)
    raise typer.Exit(0 if check.agrees and not check.differences else 1)


def _print_check(check: ServeCheck) -> None:
    from dflash_core.evaluation.acceptance import accepted_by_position

    sides = (("served", check.served_histogram), ("decoded", check.decoded_histogram))
    table = Table("", *(str(k) for k in range(1, check.block_size)), "acceptance length", "drafts", box=None)
    for (name, histogram), length in zip(
        sides, (check.served_acceptance_length, check.decoded_acceptance_length), strict=True
    ):
        shares = (f"{share:.3f}" for share in accepted_by_position(histogram))
        table.add_row(name, *shares, f"{length:.3f}", str(sum(histogram)))
    Console(highlight=False).print(table)
    for difference in check.differences:
        errors.print(difference)
    print(f"{check.run} on {check.url}, {check.prompts} prompts: {check.verdict}")


@app.command()
def lineage(
    drafter: DrafterArgument = None,
    file: Annotated[
        str | None, typer.Option(metavar="KEY", help="key or path: its rows in DRAFTER; alone: its drafters")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="every file, not only the worst learned")] = False,
    recipe: RecipeOption = DEFAULT_RECIPE,
) -> None:
    """Where a drafter comes from, down to its files; with --file to that one's lines, or which drafters it is in."""
    from dflash_core.lineage import lineage_report

    shown = sys.maxsize if every else LINEAGE_FILES
    Console(highlight=False, soft_wrap=True).print(lineage_report(open_recipe(recipe), drafter, file, shown))
