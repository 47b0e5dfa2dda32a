"""drafter_eval: the acceptance length a server would see, by real draft-and-verify decoding on held-out prompts."""

import dagster as dg

from dflash_assets.drafter_checkpoint import GPU_TAGS, drafter_checkpoint
from dflash_assets.metadata import GROUP, file_uri
from dflash_assets.process import run_core
from dflash_assets.resources import RecipeResource
from dflash_core.records import DrafterEval
from dflash_core.storage.store import open_stores


class RunConfig(dg.Config):
    """Which training run; none given: the latest."""

    run: str | None = None

    def arguments(self) -> list[str]:
        """As the core commands take it."""
        return [] if self.run is None else ["--run", self.run]


@dg.asset(
    deps=[drafter_checkpoint],
    description="Acceptance length and losslessness; against an n-gram drafter and the drafter without its features.",
    group_name=GROUP,
    kinds={"pytorch", "gpu"},
    tags={"gpu": ""},
    owners=["team:training"],
    pool="gpu",
    op_tags=GPU_TAGS,
    check_specs=[
        dg.AssetCheckSpec("lossless", asset="drafter_eval", description="The same tokens with and without a drafter."),
        dg.AssetCheckSpec("acceptance", asset="drafter_eval", description="At or above the recipe's threshold."),
    ],
)
def drafter_eval(context: dg.AssetExecutionContext, recipe: RecipeResource, config: RunConfig) -> dg.MaterializeResult:  # type: ignore[type-arg]
    """Decode the held-out prompts with the drafter, without it, and with the drafters it is compared with."""
    settings = recipe.load()
    arguments = ["dflash_core.cli", "evaluate", "--recipe", recipe.path, *config.arguments()]
    report = run_core(arguments, DrafterEval)
    threshold = settings.evaluation.min_acceptance_length
    return dg.MaterializeResult(
        metadata={
            **file_uri(open_stores(settings).derived.uri(f"drafter_eval/{report.run}/report.json")),
            "run": report.run,
            "acceptance length": round(report.acceptance_length, 3),
            "acceptance length, n-gram": round(report.acceptance_length_ngram, 3),
            "acceptance length, no features": round(report.acceptance_length_no_features, 3),
            "conditional acceptance by slot": dg.MetadataValue.json(
                [round(share, 4) for share in report.conditional_acceptance]
            ),
            "lossless": report.lossless,
            "prompts": report.prompts,
            "tokens": report.tokens,
            "tokens per second": round(report.tokens_per_s, 1),
            "tokens per second, no drafter": round(report.tokens_per_s_without, 1),
        },
        check_results=[
            dg.AssetCheckResult(check_name="lossless", passed=report.lossless or report.temperature > 0),
            dg.AssetCheckResult(
                check_name="acceptance",
                passed=report.acceptance_length >= threshold,
                metadata={"acceptance length": report.acceptance_length, "threshold": threshold},
            ),
        ],
    )
