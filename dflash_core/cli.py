"""`dflash`: every asset's twin at the terminal. The same core call, a progress bar, no Dagster.

    generate -> verify -> tokenize -> freeze -> train -> evaluate -> export
    (and inspect: any row, its mask in colour; serve-check: the same acceptance from a server; diagnose: why it is low)

Results go to standard output, progress and refusals to standard error; a refusal is one sentence and exit code 2.
Heavy imports happen inside the commands, so that `--help` and the data commands never wait for torch.
"""

import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from dflash_core.errors import UserError
from dflash_core.recipe import Recipe, load_recipe
from dflash_core.records import CommandFailure, Record, ServeCheck, SourceFile

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, add_completion=False, help=__doc__)
errors = Console(stderr=True, highlight=False, soft_wrap=True, markup=False)

RecipeOption = Annotated[Path, typer.Option("--recipe", envvar="DFLASH_RECIPE", help="the recipe, a TOML file")]
RunOption = Annotated[str | None, typer.Option("--run", help="a training run; default: the latest")]
ResultOption = Annotated[Path | None, typer.Option("--result", help="write the result, or the refusal, here as JSON")]
PartitionsArgument = Annotated[
    list[str] | None, typer.Argument(help="keys, patterns (part-0*) or ranges (A..B); default: every file")
]
at_exit = ExitStack()
LINEAGE_FILES = 20
DEFAULT_RECIPE = Path("recipes/demo.toml")


@app.command()
def generate(
    partitions: PartitionsArgument = None,
    recipe: RecipeOption = DEFAULT_RECIPE,
    server: Annotated[
        list[str] | None, typer.Option(help="a base URL instead of the recipe's; may be repeated")
    ] = None,
    anew: Annotated[bool, typer.Option("--anew", help="forget the answers of earlier runs")] = False,
) -> None:
    """generated_completions: have the target answer the prompts; what was answered once is never asked again."""
    from dflash_core.completions.generation.bar import generation_bar
    from dflash_core.completions.generation.generate import FileGenerated, Watch, generate_files
    from dflash_core.completions.generation.inputs import api_key, list_prompts, with_servers
    from dflash_core.tokenization.served import PromptEncoder

    settings = with_servers(open_recipe(recipe), server or ())
    sources = _chosen(list_prompts(settings), partitions, "prompts")
    if not sources:
        raise UserError(
            "generation.prompts holds no file of prompts (*.jsonl, *.jsonl.gz, *.jsonl.zst); put some there"
        )
    key, encoder = api_key(settings, os.environ), PromptEncoder(settings)
    made: list[FileGenerated] = []
    with generation_bar(errors) as show:
        watch = Watch(show, lambda note: errors.print(note, style="yellow"))
        for outcome in generate_files(settings, sources, encoder, key, watch, anew=anew):
            if isinstance(outcome, FileGenerated):
                made.append(outcome)
            else:
                _print_failed(outcome.source.uri, outcome.reason)
    manifests = [outcome.manifest for outcome in made]
    lines, written = sum(m.lines for m in manifests), sum(m.written for m in manifests)
    tokens = sum(m.completion_tokens for m in manifests)
    print(
        f"{len(made)} of {len(sources)} files, {sum(o.skipped for o in made)} of them still valid: {lines:,} prompts, "
        f"{written:,} completions with {tokens:,} tokens, {lines - written:,} dropped"
    )
    raise typer.Exit(0 if len(made) == len(sources) else 1)


@app.command()
def verify(partitions: PartitionsArgument = None, recipe: RecipeOption = DEFAULT_RECIPE) -> None:
    """raw_completions: read every source file whole; count rows and rejects; write nothing."""
    from dflash_core.tokenization.pipeline import FileFailed, verify_files

    settings = open_recipe(recipe)
    sources = _sources(settings, partitions)
    failed = rows = rejected = 0
    with _progress("verify", len(sources)) as advance:
        for done, outcome in enumerate(verify_files(settings, sources), 1):
            advance(done, len(sources))
            if isinstance(outcome, FileFailed):
                failed += 1
                _print_failed(outcome.source.uri, outcome.reason)
            else:
                rows += outcome.rows_read
                rejected += len(outcome.rejects)
                for reject in outcome.rejects[:3]:
                    errors.print(f"rejected {outcome.source.uri}:{reject.line}: {reject.reason} {reject.detail}")
    print(f"{len(sources) - failed} of {len(sources)} files read, {rows:,} rows, {rejected:,} rejected")
    raise typer.Exit(1 if failed else 0)


@app.command()
def tokenize(partitions: PartitionsArgument = None, recipe: RecipeOption = DEFAULT_RECIPE) -> None:
    """tokenized_shards and loss_mask_stats: tokenize what is new or changed, on every core."""
    from dflash_core.tokenization.objects import FileDone
    from dflash_core.tokenization.pipeline import process_files

    settings = open_recipe(recipe)
    sources = _sources(settings, partitions)
    totals: Counter[str] = Counter()  # sums, not outcomes: memory stays flat over any number of files
    failed = 0
    with _progress("tokenize", len(sources)) as advance:
        for done, outcome in enumerate(process_files(settings, sources), 1):
            advance(done, len(sources))
            if isinstance(outcome, FileDone):
                manifest = outcome.manifest
                totals.update(
                    files=1,
                    skipped=int(outcome.skipped),
                    read=manifest.rows_read,
                    kept=manifest.rows_kept,
                    rejected=manifest.rows_rejected,
                    tokens=manifest.tokens,
                )
            else:
                failed += 1
                _print_failed(outcome.source.uri, outcome.reason)
    print(
        f"{totals['files']} of {len(sources)} files, {totals['skipped']} of them still valid: "
        f"{totals['read']:,} rows read, {totals['kept']:,} kept, {totals['rejected']:,} rejected, "
        f"{totals['tokens']:,} tokens"
    )
    raise typer.Exit(1 if failed else 0)


@app.command()
def freeze(partitions: PartitionsArgument = None, recipe: RecipeOption = DEFAULT_RECIPE) -> None:
    """training_set: one manifest over all valid shards, and the gate's verdict."""
    from dflash_core.quality.training_set import freeze_training_set
    from dflash_core.tokenization.fingerprint import fingerprint

    settings = open_recipe(recipe)
    frozen = freeze_training_set(settings, fingerprint(settings), partitions or None)
    for reason in frozen.verdict.reasons:
        errors.print(f"gate: {reason}")
    verdict = "pass" if frozen.verdict.passed else "fail"
    print(
        f"training set {frozen.hash}: {len(frozen.shards)} files, coverage {frozen.coverage:.3f}, "
        f"{frozen.rows_kept:,} rows, {frozen.tokens:,} tokens; gate: {verdict}"
    )
    raise typer.Exit(0 if frozen.verdict.passed else 1)


@app.command()
def inspect(
    row: Annotated[str, typer.Argument(metavar="FILE[:ROW]", help="a partition or path; a row id or line number")],
    recipe: RecipeOption = DEFAULT_RECIPE,
    html: Annotated[Path | None, typer.Option(help="write a page instead")] = None,
) -> None:
    """One row of a shard: its tokens, the supervised ones in colour, from the stored ids and mask."""
    from dflash_core.tokenization.inspect import inspect_row, to_html, to_terminal

    found = inspect_row(open_recipe(recipe), row)
    if html is None:
        Console(highlight=False).print(to_terminal(found))
    else:
        html.write_text(to_html(found), encoding="utf8")
        print(html)


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
def evaluate(recipe: RecipeOption = DEFAULT_RECIPE, run: RunOption = None, result: ResultOption = None) -> None:
    """drafter_eval: acceptance length by draft-and-verify decoding on held-out prompts."""
    with _answering(result) as answer:
        from dflash_core.evaluation.evaluate import evaluate_drafter

        settings = open_recipe(recipe)
        with _progress("evaluate", settings.evaluation.prompts) as advance:
            report = evaluate_drafter(settings, run, advance)
        answer(report)
    from dflash_core.evaluation.markdown import to_terminal
    from dflash_core.storage.store import open_stores

    picture = open_stores(settings).derived.uri(report.picture.key)
    Console(highlight=False, soft_wrap=True).print(to_terminal(report, picture))


@app.command()
def diagnose(
    recipe: RecipeOption = DEFAULT_RECIPE,
    run: RunOption = None,
    drafter: Annotated[Path | None, typer.Option(help="a drafter folder, in place of a run")] = None,
    json: Annotated[Path | None, typer.Option(help="write the diagnosis here, too")] = None,
) -> None:
    """Why is acceptance low when served? Tries the known causes one by one on held-out rows."""
    from dflash_core.evaluation.diagnose.diagnose import diagnose as diagnose_drafter
    from dflash_core.evaluation.diagnose.table import to_terminal

    if run is not None and drafter is not None:
        raise UserError(f"give --run {run} or --drafter {drafter}, not both")
    with _progress("diagnose", 5) as advance:
        found = diagnose_drafter(open_recipe(recipe), run, drafter, advance)
    if json is not None:
        json.write_text(found.model_dump_json(indent=1) + "\n", encoding="utf8")
    Console(highlight=False).print(to_terminal(found))


@app.command()
def export(
    recipe: RecipeOption = DEFAULT_RECIPE,
    run: RunOption = None,
    result: ResultOption = None,
    verify: Annotated[bool, typer.Option("--verify", help="only read every exported byte again")] = False,
) -> None:
    """drafter_export: the folder that serving engines load."""
    with _answering(result) as answer:
        from dflash_core.drafter.export import export_drafter, verify_export

        settings = open_recipe(recipe)
        exported = verify_export(settings, run) if verify else export_drafter(settings, run)
        answer(exported)
    print(f"{exported.run}: {'whole: ' if verify else ''}{', '.join(f.key for f in exported.files)}")


@app.command("serve-check")
def serve_check_command(
    recipe: RecipeOption = DEFAULT_RECIPE,
    run: RunOption = None,
    url: Annotated[str | None, typer.Option(help="a running server with the exported drafter")] = None,
    plain_url: Annotated[str | None, typer.Option(help="one without, whose tokens are compared, too")] = None,
    model: Annotated[str | None, typer.Option(help="the served name; default: the only one")] = None,
    vllm_python: Annotated[Path | None, typer.Option(help="python with vLLM: start it here, without --url")] = None,
    prompts: Annotated[int, typer.Option(min=1, help="held-out prompts")] = 16,
    result: ResultOption = None,
) -> None:
    """What a server accepts of an exported drafter, beside what our own decoder accepts on the same prompts."""
    with _answering(result) as answer:
        from dflash_core.evaluation.serve_check import Question, serve_check

        settings = open_recipe(recipe)
        question = Question(url, plain_url, model, vllm_python, prompts)
        with _progress("serve-check", 2 * prompts) as advance:
            check = serve_check(settings, run, question, advance)
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
    drafter: Annotated[
        str | None, typer.Argument(metavar="[DRAFTER]", help="a training run; default: the latest")
    ] = None,
    file: Annotated[
        str | None, typer.Option(metavar="KEY", help="its rows in DRAFTER; alone: the drafters it is in")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="every file, not only the worst learned")] = False,
    recipe: RecipeOption = DEFAULT_RECIPE,
) -> None:
    """Where a drafter comes from, down to file and line; or which drafters a file is in."""
    from dflash_core.lineage import lineage_report

    shown = sys.maxsize if every else LINEAGE_FILES
    Console(highlight=False, soft_wrap=True).print(lineage_report(open_recipe(recipe), drafter, file, shown))


@contextmanager
def _answering(result: Path | None) -> Iterator[Callable[[Record], None]]:
    """Gives a function that writes the result for a caller that is a program; a refusal is written, too."""
    from dflash_core.training.agent import die_with_parent

    def answer(record: Record) -> None:
        if result is not None:
            result.write_text(record.model_dump_json())

    if result is not None:
        die_with_parent()  # a killed run must not leave its evaluation on the GPU
    try:
        yield answer
    except UserError as error:
        answer(CommandFailure(error=str(error)))
        raise


def _print_failed(uri: str, reason: str) -> None:
    errors.print(f"failed: {reason if uri in reason else f'{uri}: {reason}'}", style="red")


@contextmanager
def _progress(what: str, total: int) -> Iterator[Callable[[int, int], None]]:
    """A bar with ETA on standard error, moved by (done, total)."""
    columns = (SpinnerColumn(), TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as progress:
        task = progress.add_task("", total=total)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def open_recipe(path: Path) -> Recipe:
    """The recipe, and until this command ends the embedded store if the recipe asks for it."""
    from dflash_core.storage.embedded import store_of

    recipe = load_recipe(path)
    at_exit.enter_context(store_of(recipe))
    return recipe


def _sources(recipe: Recipe, partitions: list[str] | None) -> list[SourceFile]:
    from dflash_core.storage.store import list_sources, open_stores

    return _chosen(list_sources(open_stores(recipe).source), partitions, "source file")


def _chosen(sources: list[SourceFile], partitions: list[str] | None, what: str) -> list[SourceFile]:
    from dflash_core.storage.selection import select_files

    return select_files(sources, partitions or (), what)


def main() -> None:
    """Entry point: a UserError is one sentence and an exit code; SIGTERM unwinds, so servers stop."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        with at_exit:
            app()
    except UserError as error:
        errors.print(f"error: {error}", style="red")
        sys.exit(error.exit_code)
    except OSError as error:
        errors.print(f"error: {error}; check the path, its permissions and the disk space", style="red")
        sys.exit(UserError.exit_code)


if __name__ == "__main__":
    main()
