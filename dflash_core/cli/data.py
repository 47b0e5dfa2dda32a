"""The commands of the data half: generate, verify, tokenize, freeze, inspect. None of them needs torch."""

import os
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from dflash_core.cli.app import DEFAULT_RECIPE, RecipeOption, app, errors, open_recipe, progress
from dflash_core.errors import UserError
from dflash_core.recipe import Recipe
from dflash_core.records import SourceFile

PartitionsArgument = Annotated[
    list[str] | None, typer.Argument(help="keys, patterns (part-0*) or ranges (A..B); default: every file")
]


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
    with progress("verify", len(sources)) as advance:
        for done, outcome in enumerate(verify_files(settings, sources), 1):
            advance(done, len(sources))
            if isinstance(outcome, FileFailed):
                failed += 1
                _print_failed(outcome.source.uri, outcome.reason)
            else:
                rows += outcome.rows_read
                rejected += len(outcome.rejects)
                for reject in outcome.rejects:
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
    with progress("tokenize", len(sources)) as advance:
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


def _print_failed(uri: str, reason: str) -> None:
    errors.print(f"failed: {reason if uri in reason else f'{uri}: {reason}'}", style="red")


def _sources(recipe: Recipe, partitions: list[str] | None) -> list[SourceFile]:
    from dflash_core.storage.store import list_sources, open_stores

    return _chosen(list_sources(open_stores(recipe).source), partitions, "source file")


def _chosen(sources: list[SourceFile], partitions: list[str] | None, what: str) -> list[SourceFile]:
    from dflash_core.storage.selection import select_files

    return select_files(sources, partitions or (), what)
