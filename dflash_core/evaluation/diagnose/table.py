"""A diagnosis at the terminal."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from dflash_core.evaluation.diagnose.diagnose import Diagnosis


def to_terminal(diagnosis: Diagnosis) -> RenderableType:
    """For rich: the gap, a line for each cause, and the conclusion."""
    trained = "not known" if diagnosis.trained_prefix is None else f"{diagnosis.trained_prefix:.2f}"
    head = Text(f"{diagnosis.drafter}, {diagnosis.prompts} held-out prompts", "bold")
    gap = Text(
        f"accepted prefix in training {trained}, measured now {diagnosis.measured_prefix:.2f}; "
        f"acceptance length served {diagnosis.served:.2f}"
    )
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("cause", no_wrap=True)
    table.add_column("best of what was tried", overflow="fold")
    for title in ("before", "after"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for finding in diagnosis.findings:
        tried = finding.tried + (f" (of {finding.alternatives})" if finding.alternatives > 1 else "")
        tried += f"; {finding.note}" if finding.note else ""
        verdict = Text("explains", "bold red") if finding.explains else Text("no" if finding.after else "-", "dim")
        table.add_row(finding.cause, tried, _number(finding.before), _number(finding.after), verdict)
    notes = [Text(note, "yellow") for note in diagnosis.notes]
    return Group(head, gap, Text(), table, Text(), *notes, Text(diagnosis.conclusion, "bold"))


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
