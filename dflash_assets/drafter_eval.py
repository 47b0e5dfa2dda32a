"""drafter_eval: the acceptance length a server would see, by real draft-and-verify decoding on held-out prompts."""

import dagster as dg

from dflash_assets import children
from dflash_assets.drafter_checkpoint import GPU_TAGS, drafter_checkpoint
from dflash_assets.metadata import GROUP, file_uri, picture, table
from dflash_assets.resources import RecipeResource
from dflash_core.records import AcceptanceCut, DrafterEval
from dflash_core.reports.sentences import interval_text, previous_text
from dflash_core.storage.layout import RunKeys


class RunConfig(dg.Config):
    """Which training run; none given: the latest."""

    run: str | None = None


@dg.asset(
    deps=[drafter_checkpoint],
    description="Acceptance length and losslessness; against an n-gram drafter and the drafter without its features.",
    group_name=GROUP,
    kinds={"pytorch", "gpu"},
    tags={"gpu": "", "stage": "evaluation"},
    owners=["team:training"],
    pool="gpu",
    op_tags=GPU_TAGS,
    check_specs=[
        dg.AssetCheckSpec(
            "lossless",
            asset="drafter_eval",
            description="The same tokens with and without a drafter.",
            blocking=True,
        ),
        dg.AssetCheckSpec(
            "acceptance", asset="drafter_eval", description="At or above the recipe's threshold.", blocking=True
        ),
        dg.AssetCheckSpec(
            "not_worse",
            asset="drafter_eval",
            description="Not worse than the previous drafter of this target beyond noise, on the same prompts.",
        ),
    ],
)
def drafter_eval(context: dg.AssetExecutionContext, recipe: RecipeResource, config: RunConfig) -> dg.MaterializeResult:  # type: ignore[type-arg]
    """Decode the held-out prompts with the drafter, without it, and with the drafters it is compared with."""
    workspace = recipe.open()
    derived = workspace.derived
    report = children.evaluate(context, workspace, config.run)
    return dg.MaterializeResult(
        metadata={
            **file_uri(derived.uri(RunKeys(report.run).report)),
            "run": report.run,
            "picture": picture(derived.read(report.picture)),
            "report": derived.uri(report.markdown.key),
            "acceptance length": round(report.acceptance_length, 3),
            "acceptance length, 95 %": interval_text(report.acceptance_interval),
            "acceptance length, mean of responses": round(report.acceptance_length_response_mean, 3),
            "responses without a verification": report.responses_without_steps,
            "acceptance length, n-gram": round(report.acceptance_length_ngram, 3),
            "acceptance length, no features": round(report.acceptance_length_no_features, 3),
            "conditional acceptance by slot": dg.MetadataValue.json(
                [round(share, 4) for share in report.conditional_acceptance]
            ),
            "accepted per step, histogram": dg.MetadataValue.json(list(report.histogram)),
            "cuts": table([_cut_row(cut) for cut in report.cuts]),
            "cuts not made": dg.MetadataValue.json(report.skipped_cuts),
            "lossless": report.lossless,
            "prompts": report.prompts,
            "tokens": report.tokens,
            "tokens per second": round(report.tokens_per_s, 1),
            "tokens per second, no drafter": round(report.tokens_per_s_without, 1),
            "speed-up": round(report.speed_up, 3),
            "previous drafter": report.previous.reason,
        },
        check_results=[
            _lossless(report),
            _acceptance(report, workspace.recipe.evaluation.min_acceptance_length),
            _not_worse(report),
        ],
    )


def _lossless(report: DrafterEval) -> dg.AssetCheckResult:
    """In fp32 a difference is an error; in reduced precision near ties make some, so it is a warning."""
    return dg.AssetCheckResult(
        check_name="lossless",
        passed=report.lossless or report.temperature > 0,
        severity=dg.AssetCheckSeverity.ERROR if report.dtype == "float32" else dg.AssetCheckSeverity.WARN,
        metadata={"prompts that differ": report.differing_prompts, "prompts": report.prompts, "dtype": report.dtype},
    )


def _acceptance(report: DrafterEval, threshold: float) -> dg.AssetCheckResult:
    return dg.AssetCheckResult(
        check_name="acceptance",
        passed=report.acceptance_length >= threshold,
        metadata={"acceptance length": report.acceptance_length, "threshold": threshold},
    )


def _not_worse(report: DrafterEval) -> dg.AssetCheckResult:
    """A comparison that could not be made passes, and says so."""
    previous = report.previous
    made = previous.difference is not None and previous.interval is not None
    return dg.AssetCheckResult(
        check_name="not_worse",
        passed=previous.verdict != "worse",
        description=previous_text(report),
        metadata={
            "verdict": previous.verdict,
            "reason": previous.reason,
            **({"previous run": previous.run} if previous.run is not None else {}),
            **({"difference": previous.difference or 0.0} if made else {}),
        },
    )


def _cut_row(cut: AcceptanceCut) -> dict[str, str | int | float]:
    return {
        "cut": cut.cut,
        "name": cut.name,
        "prompts": cut.prompts,
        "acceptance length": round(cut.acceptance_length, 3),
        "95 %": interval_text(cut.interval),
    }
