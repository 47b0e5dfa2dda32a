"""Results as people read them at a terminal, for rich. What a page says, too, is said with the same words."""

from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from dflash_core.records import DrafterEval, ServeCheck
from dflash_core.reports import sentences

if TYPE_CHECKING:
    import polars as pl

    from dflash_core.diagnose.diagnose import Diagnosis
    from dflash_core.lineage import Lineage
    from dflash_core.shards.inspect import InspectedRow
    from dflash_core.storage.s3 import Store

SUPERVISED, CONTEXT = ("bold green", "bold cyan"), "dim"
"""In turn, so that tokens can be told apart."""
VERDICTS = {"better": "green", "no worse": "green", "worse": "red", "skipped": "dim"}


def inspected_row(row: "InspectedRow") -> RenderableType:
    """Context dim, supervised tokens in colour; control characters are made visible, never sent."""
    body = Text()
    for number, piece in enumerate(row.pieces):
        body.append(piece.visible, SUPERVISED[number % 2] if piece.supervised else CONTEXT)
    head = [Text(row.title, "bold"), Text(row.summary, "dim")]
    if row.dropped:
        head.append(Text(f"in no shard: {row.dropped}; rendered again from the source file", "red"))
    return Group(*head, Text(), body)


def found_rows(rows: "pl.DataFrame") -> RenderableType:
    """`file:line`, what is stored of each row."""
    table = _plain_table()
    table.add_column("row", no_wrap=True)
    table.add_column("id", overflow="fold")
    for title in ("tokens", "supervised"):
        table.add_column(title, justify="right")
    table.add_column("finish reason", no_wrap=True)
    table.add_column("flags", overflow="fold")
    for row in rows.iter_rows(named=True):
        numbers = (f"{row['tokens']:,}", f"{row['supervised_tokens']:,}")
        place = escape(f"{row['file']}:{row['line']}")
        table.add_row(place, escape(row["row_id"]), *numbers, escape(row["finish_reason"]), row["flags"])
    return table


def acceptance(report: DrafterEval, picture_uri: str) -> RenderableType:
    """The numbers that matter, and where the picture is."""
    head = Text(f"{report.run}: block size {report.block_size}, {report.prompts} held-out prompts", "bold")
    table = _plain_table("", "acceptance length", "95 %")
    for name, length, interval in sentences.rivals(report):
        table.add_row(name, f"{length:.2f}", sentences.interval_text(interval))
    files = sorted((cut for cut in report.cuts if cut.cut == "file"), key=lambda cut: cut.acceptance_length)
    cuts = {f"{cut.cut} {cut.name} ({cut.prompts} prompts)": cut for cut in report.cuts if cut.cut != "file"}
    cuts |= {f"worst file: {cut.name}": cut for cut in files[: 1 if len(files) > 1 else 0]}
    for name, cut in cuts.items():
        table.add_row(name, f"{cut.acceptance_length:.2f}", sentences.interval_text(cut.interval))
    slots = " ".join(f"{100 * share:.0f}" for share in report.conditional_acceptance)
    colour = "dim" if report.temperature > 0 else "green" if report.lossless else "red"
    facts = [
        Text(f"accepted by slot, given all before: {slots} %"),
        Text(sentences.speed_text(report)),
        Text(sentences.lossless_text(report), colour),
        Text(f"previous drafter: {sentences.previous_text(report)}", VERDICTS[report.previous.verdict]),
        *(Text(f"no cut by {name}: {reason}", "dim") for name, reason in report.skipped_cuts.items()),
        Text(f"picture: {picture_uri}"),
    ]
    return Group(head, Text(), table, Text(), *facts)


def diagnosis(found: "Diagnosis") -> RenderableType:
    """The gap, a line for each cause, and the conclusion."""
    trained = "not known" if found.trained_prefix is None else f"{found.trained_prefix:.2f}"
    head = Text(f"{found.drafter}, {found.prompts} held-out prompts", "bold")
    gap = Text(
        f"accepted prefix in training {trained}, measured now {found.measured_prefix:.2f}; "
        f"acceptance length served {found.served:.2f}"
    )
    table = _plain_table()
    table.add_column("cause", no_wrap=True)
    table.add_column("best of what was tried", overflow="fold")
    for title in ("before", "after"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for finding in found.findings:
        tried = finding.tried + (f" (of {finding.alternatives})" if finding.alternatives > 1 else "")
        tried += f"; {finding.note}" if finding.note else ""
        numbers = ("" if value is None else f"{value:.2f}" for value in (finding.before, finding.after))
        verdict = Text("explains", "bold red") if finding.explains else Text("no" if finding.after else "-", "dim")
        table.add_row(finding.cause, tried, *numbers, verdict)
    notes = [Text(note, "yellow") for note in found.notes]
    return Group(head, gap, Text(), table, Text(), *notes, Text(found.conclusion, "bold"))


def serve_check(check: ServeCheck) -> RenderableType:
    """Acceptance by position, served and decoded."""
    from dflash_core.decoding.acceptance import accepted_by_position

    table = Table("", *(str(k) for k in range(1, check.block_size)), "acceptance length", "drafts", box=None)
    sides = (
        ("served", check.served_histogram, check.served_acceptance_length),
        ("decoded", check.decoded_histogram, check.decoded_acceptance_length),
    )
    for name, histogram, length in sides:
        shares = (f"{share:.3f}" for share in accepted_by_position(histogram))
        table.add_row(name, *shares, f"{length:.3f}", str(sum(histogram)))
    return table


def lineage_tree(
    lineage: "Lineage", derived: "Store", files: "pl.DataFrame", rows: "pl.DataFrame | None" = None
) -> RenderableType:
    """The chain: the drafter, what it was made with, its training set, its files.

    Args:
        lineage: the drafter's.
        derived: where its objects are.
        files: those of its files to show.
        rows: of the only file to show; None: no rows.
    """
    checkpoint, frozen = lineage.checkpoint, lineage.training_set
    weights = f"{escape(derived.uri(checkpoint.weights.key))}  sha256 {checkpoint.weights.sha256[:12]}"
    tree = Tree(f"[bold]{checkpoint.run}[/]  {weights}")
    settings = checkpoint.settings
    stored = f" ({escape(derived.uri(settings.key))}  sha256 {settings.sha256[:12]})" if settings else ""
    tree.add(f"recipe {checkpoint.recipe}{stored}, training code {checkpoint.code_version}, {checkpoint.steps:,} steps")
    tree.add(f"target {checkpoint.target_fingerprint}")
    branch = tree.add(
        f"[bold]training set {frozen.hash}[/], gate {checkpoint.gate}: {frozen.rows_kept:,} rows of "
        f"{len(frozen.shards)} files, coverage {frozen.coverage:.3f}, tokenization {frozen.fingerprint}"
    )
    for file in files.iter_rows(named=True):
        node = _add_file(branch, file, derived)
        for row in () if rows is None else rows.iter_rows(named=True):
            where = escape(f"{file['source_uri']}:{row['line']}  {row['row_id']}")
            node.add(f"{where}  {row['tokens']:,} tokens, {row['supervised_tokens']:,} supervised")
    if rows is None and len(lineage.files) > len(files):
        branch.add(f"and {len(lineage.files) - len(files):,} more files (--all)")
    return tree


def drafters_table(partition: str, drafters: "pl.DataFrame") -> RenderableType:
    """The drafters that learned from a file."""
    if drafters.is_empty():
        return f"no finished drafter was trained on {escape(partition)}"
    table = Table("drafter", "training set", "rows", "tokens", "mean loss", "accepted prefix", title=escape(partition))
    for run, training_set, rows, tokens, loss, prefix in drafters.iter_rows():
        table.add_row(run, training_set, f"{rows:,}", f"{tokens:,}", f"{loss:.3f}", f"{prefix:.2f}")
    return table


def _add_file(branch: Tree, file: dict[str, Any], derived: "Store") -> Tree:
    """One file: source, shard, and what was learned from it."""
    colour = "green" if file["state"] == "unchanged" else "red"
    source = f"[bold]{escape(file['source_uri'])}[/]  ETag {file['source_etag'][:12]}"
    node = branch.add(f"{source}  [{colour}]{file['state']}[/]")
    lost = "tokenized again since"
    if file["rows_rejected"] is not None:
        dropped = "" if file["rows_dropped"] is None else f"{file['rows_dropped']:,} dropped, "
        lost = f"{dropped}{file['rows_rejected']:,} rejected"
    stored = f"{escape(derived.uri(file['shard_key']))}  sha256 {file['shard_sha256'][:12]}"
    node.add(f"shard {stored}  {file['rows']:,} rows, {lost}")
    if file["trained_rows"] is None:
        node.add("[yellow]no row was trained on[/]")
    else:
        node.add(
            f"learned from {file['trained_rows']:,} rows, {file['trained_tokens']:,} tokens: mean loss "
            f"{file['mean_loss']:.3f}, accepted prefix {file['accepted_prefix']:.2f}"
        )
    return node


def _plain_table(*titles: str) -> Table:
    return Table(*titles, box=None, pad_edge=False, header_style="dim")
