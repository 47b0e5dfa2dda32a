"""How a fact is said: in the terminal, on a page and in the UI with the same words."""

from collections.abc import Mapping

from dflash_core.records import LEAST_PROMPTS, DrafterEval, Verdict

Interval = tuple[float, float]


def percent(share: float) -> str:
    """`0.872` as `87.2 %`."""
    return f"{100 * share:.1f} %"


def share_of(part: int, whole: int) -> str:
    """The share as `87.2 %`; of nothing: `0.0 %`."""
    return percent(part / whole if whole else 0.0)


def short(text: str, width: int) -> str:
    """At most `width` characters, the middle left out."""
    return text if len(text) <= width else f"{text[: width // 2]}…{text[-(width - width // 2 - 1) :]}"


def rows_text(read: int, kept: int, dropped: int | None, rejected: int) -> str:
    """`1,000 rows read: 980 kept, 12 dropped, 8 rejected`; dropped None: they are counted among the rejected."""
    parts = [f"{kept:,} kept", *([] if dropped is None else [f"{dropped:,} dropped"]), f"{rejected:,} rejected"]
    return f"{read:,} rows read: {', '.join(parts)}"


def reasons_text(reasons: Mapping[str, int] | None) -> str:
    """`too few supervised tokens 12, no supervised token 3`; nothing: `nothing`."""
    return ", ".join(f"{reason} {rows:,}" for reason, rows in (reasons or {}).items()) or "nothing"


def gate_text(verdict: Verdict) -> str:
    """`gate passed` or `gate failed`."""
    return "gate passed" if verdict.passed else "gate failed"


def interval_text(interval: Interval | None) -> str:
    """`6.10 to 6.40`, or that there is none."""
    return "too few prompts for an interval" if interval is None else f"{interval[0]:.2f} to {interval[1]:.2f}"


def lossless_text(report: DrafterEval) -> str:
    """Whether the drafter changed what the target says."""
    if report.temperature > 0:
        return "outputs are sampled, so not compared with the target's own"
    if report.lossless:
        return "lossless: every output is the target's own, token by token"
    return f"NOT lossless: {report.differing_prompts} of {report.prompts} outputs differ from the target's own"


def speed_text(report: DrafterEval) -> str:
    """The speed-up with its interval, and what it is made of."""
    return (
        f"speed-up {report.speed_up:.2f} ({interval_text(report.speed_up_interval)}): {report.tokens_per_s:.1f} "
        f"tokens/s, {report.tokens_per_s_without:.1f} without"
    )


def previous_text(report: DrafterEval) -> str:
    """The comparison with the drafter before."""
    return f"{report.previous.verdict}: {report.previous.reason}"


def response_mean_text(report: DrafterEval) -> str:
    """The mean over responses, and which of them it leaves out."""
    left_out = report.responses_without_steps
    beside = f" (left out: {left_out} that ended with the first token)" if left_out else ""
    return f"{report.acceptance_length_response_mean:.2f}{beside}"


def rivals(report: DrafterEval) -> list[tuple[str, float, Interval | None]]:
    """The drafter and what it must beat: name, acceptance length, interval."""
    return [
        ("drafter", report.acceptance_length, report.acceptance_interval),
        ("n-gram drafter", report.acceptance_length_ngram, report.acceptance_interval_ngram),
        ("drafter without features", report.acceptance_length_no_features, report.acceptance_interval_no_features),
    ]


def convention_text() -> str:
    """What an acceptance length is."""
    return (
        "Acceptance length is 1 + accepted proposals / verification steps, what serving engines report; intervals are "
        f"95 %, bootstrapped over prompts, of which they need {LEAST_PROMPTS}."
    )
