"""The commands of the data half: generate, verify, tokenize, freeze, rows, inspect. None of them needs torch."""

import os
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dflash_core.cli.app import DEFAULT_RECIPE, RecipeOption, app, errors, open_recipe, output, show
from dflash_core.errors import UserError
from dflash_core.records import SourceFile
from dflash_core.reports import sentences

if TYPE_CHECKING:
    from dflash_core.workspace import Workspace

ROWS_SHOWN = 20

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
    from dflash_core.cli.bars import generation_bar
    from dflash_core.generation.generate import (
        FileGenerated,
        GenerationWatch,
        api_key,
        generate_files,
        list_prompts,
        with_servers,
    )
    from dflash_core.tokenization.encode import PromptEncoder

    workspace = with_servers(open_recipe(recipe), server or ())
    settings = workspace.recipe
    sources = _chosen(list_prompts(workspace), partitions, "prompts")
    if not sources:
        raise UserError(
            "generation.prompts holds no file of prompts (*.jsonl, *.jsonl.gz, *.jsonl.zst); put some there"
        )
    key, encoder = api_key(settings, os.environ), PromptEncoder(settings.tokenizer_path, settings.tokenization)
    made: list[FileGenerated] = []
    with generation_bar() as show:
        watch = GenerationWatch(show, lambda note: errors.print(note, style="yellow"))
        for outcome in generate_files(workspace, sources, encoder, key, watch, anew=anew):
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
    from dflash_core.cli.bars import progress
    from dflash_core.shards.overlap import FileFailed
    from dflash_core.shards.pipeline import verify_files

    workspace = open_recipe(recipe)
    sources = _sources(workspace, partitions)
    failed = rows = rejected = 0
    with progress("verify", len(sources)) as advance:
        for done, outcome in enumerate(verify_files(workspace, sources), 1):
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
    from dflash_core.cli.bars import progress
    from dflash_core.shards.overlap import FileFailed
    from dflash_core.shards.pipeline import tokenize_files

    workspace = open_recipe(recipe)
    sources = _sources(workspace, partitions)
    totals: Counter[str] = Counter()  # sums, not outcomes: memory stays flat over any number of files
    failed = 0
    with progress("tokenize", len(sources)) as advance:
        for done, outcome in enumerate(tokenize_files(workspace, sources), 1):
            advance(done, len(sources))
            if isinstance(outcome, FileFailed):
                failed += 1
                _print_failed(outcome.source.uri, outcome.reason)
                continue
            manifest = outcome.manifest
            totals.update(
                files=1,
                skipped=int(outcome.skipped),
                read=manifest.rows_read,
                kept=manifest.rows_kept,
                dropped=manifest.rows_dropped or 0,
                rejected=manifest.rows_rejected,
                tokens=manifest.tokens,
            )
    rows = sentences.rows_text(totals["read"], totals["kept"], totals["dropped"], totals["rejected"])
    print(
        f"{totals['files']} of {len(sources)} files, {totals['skipped']} of them still valid; {rows}, "
        f"{totals['tokens']:,} tokens"
    )
    raise typer.Exit(1 if failed else 0)


@app.command()
def freeze(partitions: PartitionsArgument = None, recipe: RecipeOption = DEFAULT_RECIPE) -> None:
    """training_set: one manifest over all valid shards, and the gate's verdict."""
    from dflash_core.training_set.freeze import freeze_training_set

    frozen = freeze_training_set(open_recipe(recipe), partitions or None)
    for reason in frozen.verdict.reasons:
        errors.print(f"gate: {reason}")
    print(
        f"training set {frozen.hash}: {len(frozen.shards)} files, coverage {frozen.coverage:.3f}, "
        f"{frozen.rows_kept:,} rows, {frozen.tokens:,} tokens; {sentences.gate_text(frozen.verdict)}"
    )
    raise typer.Exit(0 if frozen.verdict.passed else 1)


@app.command()
def rows(
    where: Annotated[str, typer.Argument(metavar="WHERE", help="a condition in SQL")],
    partitions: PartitionsArgument = None,
    recipe: RecipeOption = DEFAULT_RECIPE,
    limit: Annotated[
        int | None, typer.Option(min=0, help=f"rows shown; default: {ROWS_SHOWN}, of --json and --csv all")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="a JSON object a line")] = False,
    csv: Annotated[bool, typer.Option("--csv", help="a table with a header")] = False,
) -> None:
    """Which rows are like this? `dflash rows "supervised_tokens < 10 and finish_reason = 'stop'"`

    Columns: file, line, row_id, tokens, prompt_tokens, supervised_tokens, finish_reason, and each flag (`empty_thought`
    and so on), true or false. Looks at the valid shards; rows that were dropped or rejected are in none.
    """
    if json and csv:
        raise UserError("give --json or --csv, not both")
    from dflash_core.cli.terminal import found_rows
    from dflash_core.shards.query import find_rows
    from dflash_core.shards.state import shard_states
    from dflash_core.tokenization.tokenizer import fingerprint

    workspace = open_recipe(recipe)
    sources, downloads = _sources(workspace, partitions), workspace.recipe.storage.downloads
    states = list(shard_states(workspace.derived, fingerprint(workspace.recipe), sources, downloads))
    valid = [state.manifest for state in states if state.problem is None and state.manifest is not None]
    if not valid:
        raise UserError("none of these files has a valid shard; tokenize them first (dflash tokenize)")
    found = find_rows(workspace, valid, where)
    everything = found.height if json or csv else ROWS_SHOWN
    shown = found.head(everything if limit is None else limit)
    if json:
        print(shown.write_ndjson(), end="")
    elif csv:
        print(shown.write_csv(), end="")
    else:
        show(found_rows(shown))
    whole = sum(manifest.rows_kept for manifest in valid)
    left_out = "" if shown.height == found.height else f", {shown.height} of them shown (--limit)"
    without = "" if len(valid) == len(states) else f"; without a valid shard: {len(states) - len(valid)} files"
    errors.print(
        f"{found.height:,} of {whole:,} rows ({sentences.share_of(found.height, whole)}) in "
        f"{found['file'].n_unique():,} of {len(valid):,} files{left_out}{without}"
    )


@app.command()
def inspect(
    row: Annotated[str, typer.Argument(metavar="FILE[:ROW]", help="a partition or path; a row id or line number")],
    recipe: RecipeOption = DEFAULT_RECIPE,
    html: Annotated[Path | None, typer.Option(help="write a page instead")] = None,
) -> None:
    """One row of a shard: its tokens, the supervised ones in colour, from the stored ids and mask."""
    from dflash_core.cli.terminal import inspected_row
    from dflash_core.reports.pages import row_page
    from dflash_core.shards.inspect import inspect_row

    found = inspect_row(open_recipe(recipe), row)
    if html is None:
        output.print(inspected_row(found))
        return
    tokens = ((piece.visible, " ".join(map(str, piece.ids)), piece.supervised) for piece in found.pieces)
    html.write_text(row_page(found.title, found.summary, found.dropped, tokens), encoding="utf8")
    print(html)


def _print_failed(uri: str, reason: str) -> None:
    errors.print(f"failed: {reason if uri in reason else f'{uri}: {reason}'}", style="red")


def _sources(workspace: "Workspace", partitions: list[str] | None) -> list[SourceFile]:
    from dflash_core.storage.partitions import list_sources

    return _chosen(list_sources(workspace.source), partitions, "source file")


def _chosen(sources: list[SourceFile], partitions: list[str] | None, what: str) -> list[SourceFile]:
    from dflash_core.storage.partitions import select_files

    return select_files(sources, partitions or (), what)
