"""The commands of the drafter: train, evaluate, diagnose, export, serve-check, lineage."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from dflash_core.cli.app import (
    DEFAULT_RECIPE,
    DrafterArgument,
    RecipeOption,
    ResultOption,
    answering,
    app,
    errors,
    open_recipe,
    show,
)

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
    from dflash_core.cli.bars import training_steps
    from dflash_core.training.job import Job, StopRequest, stop_on_signals

    workspace = open_recipe(recipe)
    job, stop = Job(training_set, accept_failed_gate, profile), StopRequest()
    with stop_on_signals(stop), training_steps() as on_step:
        if len(workspace.recipe.training.placement.drafters) > 1:
            from dflash_core.training.ranks import train_in_ranks

            checkpoint = train_in_ranks(workspace, job, on_step, stop)
        else:
            from dflash_core.training.train import train as train_here

            checkpoint = train_here(workspace, job, on_step, stop)
    print(
        f"{checkpoint.run}: {checkpoint.steps:,} steps, held-out accepted prefix "
        f"{checkpoint.held_out_accepted_prefix:.2f}, {workspace.derived.uri(checkpoint.weights.key)}"
    )


@app.command()
def evaluate(
    drafter: DrafterArgument = None, recipe: RecipeOption = DEFAULT_RECIPE, result: ResultOption = None
) -> None:
    """drafter_eval: acceptance length by draft-and-verify decoding on held-out prompts."""
    from dflash_core.cli.bars import progress
    from dflash_core.cli.terminal import acceptance

    with answering(result) as answer:
        from dflash_core.evaluation.evaluate import evaluate_drafter

        workspace = open_recipe(recipe)
        with progress("evaluate", workspace.recipe.evaluation.prompts) as advance:
            report = evaluate_drafter(workspace, drafter, advance)
        answer(report)
    show(acceptance(report, workspace.derived.uri(report.picture.key)))


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
    from dflash_core.cli.bars import progress
    from dflash_core.cli.terminal import diagnosis
    from dflash_core.diagnose.diagnose import diagnose as diagnose_drafter

    folder = Path(drafter) if drafter is not None and ("/" in drafter or Path(drafter).is_dir()) else None
    with progress("diagnose", 5) as advance:
        found = diagnose_drafter(open_recipe(recipe), drafter if folder is None else None, folder, advance)
    if json is not None:
        json.write_text(found.model_dump_json(indent=1) + "\n", encoding="utf8")
    show(diagnosis(found))


@app.command()
def export(
    drafter: DrafterArgument = None,
    recipe: RecipeOption = DEFAULT_RECIPE,
    result: ResultOption = None,
    verify: Annotated[bool, typer.Option("--verify", help="only read every exported byte again")] = False,
) -> None:
    """drafter_export: the folder that serving engines load."""
    with answering(result) as answer:
        from dflash_core.export.export import export_drafter, verify_export

        workspace = open_recipe(recipe)
        exported = verify_export(workspace, drafter) if verify else export_drafter(workspace, drafter)
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
    """What a server accepts of an exported drafter, next to what our own decoder accepts on the same prompts."""
    from dflash_core.cli import terminal
    from dflash_core.cli.bars import progress

    with answering(result) as answer:
        from dflash_core.serving.serve_check import Question, serve_check

        workspace = open_recipe(recipe)
        question = Question(url, plain_url, model, vllm_python, prompts)
        with progress("serve-check", 2 * prompts) as advance:
            check = serve_check(workspace, drafter, question, advance)
        answer(check)
    show(terminal.serve_check(check))
    for difference in check.differences:
        errors.print(difference)
    print(f"{check.run} on {check.url}, {check.prompts} prompts: {check.verdict}")
    raise typer.Exit(0 if check.agrees and not check.differences else 1)


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
    from dflash_core.cli.terminal import drafters_table, lineage_tree
    from dflash_core.lineage import drafters_of, trace_drafter, trace_rows
    from dflash_core.storage.partitions import named_partition

    workspace = open_recipe(recipe)
    derived = workspace.derived
    if file is None:
        traced = trace_drafter(workspace, drafter)
        show(lineage_tree(traced, derived, traced.files.head(sys.maxsize if every else LINEAGE_FILES)))
        return
    partition = named_partition(file)
    if drafter is None:
        show(drafters_table(partition, drafters_of(workspace, partition)))
        return
    traced = trace_drafter(workspace, drafter)
    rows = trace_rows(workspace, traced, partition)
    (of_file,) = traced.files.filter(partition=partition).iter_slices(1)
    show(lineage_tree(traced, derived, of_file, rows))
