"""The report for people: Markdown that needs nothing else (its picture is inside), and the table at the terminal."""

import base64
import re
from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from dflash_core.evaluation.acceptance import LEAST_PROMPTS, interval_text
from dflash_core.records import AcceptanceCut, DrafterEval

FILES_LISTED = 20
VERDICTS = {"better": "green", "no worse": "green", "worse": "red", "skipped": "yellow"}


def report_markdown(report: DrafterEval, picture: bytes) -> str:
    """The whole report; the picture's bytes come last, so that the text can be read as it is."""
    lossless = f"{report.prompts - report.differing_prompts} of {report.prompts} prompts"
    sections = [
        f"# Acceptance of {report.run}",
        f"Block size {report.block_size}, {report.prompts} held-out prompts, temperature {report.temperature:g}, "
        f"target in {report.dtype}. Acceptance length is 1 + accepted proposals / verification steps, what serving "
        f"engines report; intervals are 95 %, bootstrapped over prompts, of which they need {LEAST_PROMPTS}.",
        "![acceptance][picture]",
        _table(("", "acceptance length", "interval"), _rivals(report)),
        _table(
            ("", ""),
            (
                ("mean over responses", _response_mean(report)),
                ("tokens per second, with / without", f"{report.tokens_per_s:.1f} / {report.tokens_per_s_without:.1f}"),
                (f"speed-up ({report.timed_prompts} prompts)", _speed_up(report)),
                ("output equal to the target's own", lossless if report.temperature == 0 else "not comparable"),
                ("against the previous drafter", f"{report.previous.verdict}: {report.previous.reason}"),
            ),
        ),
        "## By slot\n\n"
        + _table(
            ("slot", "accepted, given all before", "steps that stopped before it"),
            (
                (str(slot), f"{100 * share:.1f} %", str(report.histogram[slot - 1]))
                for slot, share in enumerate(report.conditional_acceptance, 1)
            ),
        ),
        *_cut_sections(report),
        "## Where it stops\n\n"
        + _table(("the target said", "times"), ((_code(text), str(count)) for text, count in report.stops.items()))
        + "\n\n"
        + _table(
            ("file", "text before", "accepted", "refused", "the target said"),
            ((e.file, _code(e.before), _code(e.accepted), _code(e.refused), _code(e.said)) for e in report.examples),
        ),
        f"[picture]: data:image/png;base64,{base64.b64encode(picture).decode()}",
    ]
    return "\n\n".join(sections) + "\n"


def to_terminal(report: DrafterEval, picture_uri: str) -> RenderableType:
    """For rich: the numbers that matter, and where the picture lies."""
    head = Text(f"{report.run}: block size {report.block_size}, {report.prompts} held-out prompts", "bold")
    table = Table("", "acceptance length", "95 %", box=None, pad_edge=False, header_style="dim")
    for name, length, interval in _rivals(report):
        table.add_row(name, length, interval)
    for cut in report.cuts:
        if cut.cut != "file":
            table.add_row(
                f"{cut.cut} {cut.name} ({cut.prompts} prompts)",
                f"{cut.acceptance_length:.2f}",
                interval_text(cut.interval),
            )
    files = sorted((cut for cut in report.cuts if cut.cut == "file"), key=lambda cut: cut.acceptance_length)
    for cut in files[: 1 if len(files) > 1 else 0]:
        table.add_row(f"worst file: {cut.name}", f"{cut.acceptance_length:.2f}", interval_text(cut.interval))
    slots = " ".join(f"{100 * share:.0f}" for share in report.conditional_acceptance)
    facts = [
        Text(f"accepted by slot, given all before: {slots} %"),
        Text(
            f"speed-up {_speed_up(report)}: {report.tokens_per_s:.1f} tokens/s, "
            f"{report.tokens_per_s_without:.1f} without"
        ),
        _lossless(report),
        Text(
            f"previous drafter: {report.previous.verdict}, {report.previous.reason}", VERDICTS[report.previous.verdict]
        ),
        *(Text(f"no cut by {name}: {reason}", "dim") for name, reason in report.skipped_cuts.items()),
        Text(f"picture: {picture_uri}"),
    ]
    return Group(head, Text(), table, Text(), *facts)


def _rivals(report: DrafterEval) -> list[tuple[str, str, str]]:
    rows = (
        ("drafter", report.acceptance_length, report.acceptance_interval),
        ("n-gram drafter", report.acceptance_length_ngram, report.acceptance_interval_ngram),
        ("drafter without features", report.acceptance_length_no_features, report.acceptance_interval_no_features),
    )
    return [(name, f"{length:.2f}", interval_text(interval)) for name, length, interval in rows]


def _response_mean(report: DrafterEval) -> str:
    left_out = report.responses_without_steps
    beside = f" (left out: {left_out} that ended with the first token)" if left_out else ""
    return f"{report.acceptance_length_response_mean:.2f}{beside}"


def _lossless(report: DrafterEval) -> Text:
    if report.temperature > 0:
        return Text("outputs are sampled, so not compared with the target's own", "dim")
    if report.lossless:
        return Text("lossless: every output is the target's own, token by token", "green")
    return Text(
        f"NOT lossless: {report.differing_prompts} of {report.prompts} outputs differ from the target's own", "red"
    )


def _speed_up(report: DrafterEval) -> str:
    return f"{report.speed_up:.2f} ({interval_text(report.speed_up_interval)})"


def _cut_sections(report: DrafterEval) -> Iterable[str]:
    for kind in dict.fromkeys(cut.cut for cut in report.cuts):
        cuts = [cut for cut in report.cuts if cut.cut == kind]
        shown = sorted(cuts, key=lambda cut: cut.acceptance_length)[:FILES_LISTED] if kind == "file" else cuts
        head = ["name", "prompts", "acceptance length", "interval"]
        if kind == "temperature":
            head += ["n-gram", "without features"]
        text = f"## By {kind}\n\n" + _table(head, (_cut_row(cut) for cut in shown))
        if len(shown) < len(cuts):
            text += f"\n\nThe lowest {len(shown)} of {len(cuts)}."
        yield text
    for name, reason in report.skipped_cuts.items():
        yield f"No cut by {name}: {reason}."


def _cut_row(cut: AcceptanceCut) -> Sequence[str]:
    rivals = (cut.acceptance_length_ngram, cut.acceptance_length_no_features)
    row = (cut.name, str(cut.prompts), f"{cut.acceptance_length:.2f}", interval_text(cut.interval))
    return (*row, *(f"{rival:.2f}" for rival in rivals if rival is not None))


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _code(text: str) -> str:
    """Text of a model as one harmless cell: line breaks visible, in a fence longer than any inside."""
    shown = text.replace("\n", "↵").replace("\t", "⇥")
    shown = "".join(c if c.isprintable() else chr(0x2400 + ord(c)) if ord(c) < 32 else "�" for c in shown)
    fence = "`" * (1 + max(map(len, re.findall("`+", shown)), default=0))
    return f"{fence} {shown} {fence}" if shown else ""
