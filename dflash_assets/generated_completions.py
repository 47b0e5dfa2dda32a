"""generated_completions: prompts -> an OpenAI-compatible server -> the source file of the same partition.

Upstream of raw_completions and optional: most sources have no prompts, and are materialized without it.
A backfill takes many files at once, so that the servers stay busy from one file to the next; its size differs
from that of the file assets, so that a bad file of prompts fails alone.
"""

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import dagster as dg

from dflash_assets.failures import failure, observations
from dflash_assets.metadata import GROUP, file_uri, picture
from dflash_assets.partitions import completion_files, sources_of
from dflash_assets.resources import RecipeResource
from dflash_core.errors import StorageError, UserError
from dflash_core.records import GeneratedFile, SourceFile
from dflash_core.storage.partitions import find_files
from dflash_core.workspace import Workspace

if TYPE_CHECKING:
    from dflash_core.generation.progress import GenerationProgress

FILES_PER_RUN = 100
LOG_EVERY_S = 15.0

Event = dg.AssetMaterialization | dg.AssetObservation | dg.MaterializeResult  # type: ignore[type-arg]
Metadata = dict[str, dg.MetadataValue | str | int | float | bool]


class GenerationConfig(dg.Config):
    """What the launchpad may change."""

    servers: list[str] | None = None
    """Base URLs instead of the recipe's."""
    anew: bool = False
    """Forget the answers of earlier runs."""


@dg.asset(
    partitions_def=completion_files,
    backfill_policy=dg.BackfillPolicy.multi_run(FILES_PER_RUN),
    output_required=False,
    description="A file of prompts, answered by the target behind an OpenAI-compatible server.",
    group_name=GROUP,
    kinds={"openai", "s3"},
    tags={"stage": "completions"},
    owners=["team:data"],
    pool="servers",
)
def generated_completions(
    context: dg.AssetExecutionContext, recipe: RecipeResource, config: GenerationConfig
) -> Iterator[Event]:
    """Generate the files of this run's partitions; every answer that was ever committed is used, not asked again."""
    report = _Report(context, alone=len(context.partition_keys) == 1)
    failed: dict[str, str] = {}
    stopped = ""
    try:
        workspace = recipe.open()
        prompts, without = _prompts_of(workspace, list(context.partition_keys))
        there, gone = _written_by_others(workspace, without)
        yield from (report.untouched(source) for source in there)
        for partition in gone:
            failed[partition] = "there are neither prompts nor completions"
            yield from observations(context, partition, failed[partition], None)
        yield from _generate(workspace, prompts, config, report, failed)
    except UserError as error:
        stopped = str(error)
    if failed or stopped:
        raise failure(failed, stopped, len(context.partition_keys))


def _generate(
    workspace: Workspace, prompts: list[SourceFile], config: GenerationConfig, report: "_Report", failed: dict[str, str]
) -> Iterator[Event]:
    if not prompts:
        return
    # The client is paid for only where there are prompts.
    from dflash_core.generation.generate import (
        FileGenerated,
        GenerationWatch,
        api_key,
        generate_files,
        with_servers,
    )
    from dflash_core.tokenization.encode import PromptEncoder

    workspace = with_servers(workspace, config.servers or ())
    settings = workspace.recipe
    key, watch = api_key(settings, os.environ), GenerationWatch(report.progress, report.note)
    encoder = PromptEncoder(settings.tokenizer_path, settings.tokenization)
    for outcome in generate_files(workspace, prompts, encoder, key, watch, anew=config.anew):
        if isinstance(outcome, FileGenerated):
            yield report.generated(outcome.manifest, outcome.skipped)
        else:
            failed[outcome.source.partition] = outcome.reason
            yield from observations(report.context, outcome.source.partition, outcome.reason, outcome.source.etag)


def _prompts_of(workspace: Workspace, partitions: list[str]) -> tuple[list[SourceFile], list[str]]:
    """The files of prompts of these partitions, and the partitions that have none."""
    store = workspace.prompts
    found = {source.partition: source for source in find_files(store)} if store is not None else {}
    return [found[key] for key in partitions if key in found], [key for key in partitions if key not in found]


def _written_by_others(workspace: Workspace, partitions: list[str]) -> tuple[list[SourceFile], list[str]]:
    """The source files of partitions without prompts, and the partitions that do not even have that."""
    if not partitions:
        return [], []
    try:
        return sources_of(workspace, partitions)
    except StorageError:
        return [], partitions


@dataclass
class _Report:
    """What Dagster is told. A partition that is alone gives an output, so that its downstream may share the run."""

    context: dg.AssetExecutionContext
    alone: bool
    _logged_at: float = 0.0

    def progress(self, now: "GenerationProgress") -> None:
        """A line in the log every now and then."""
        if time.monotonic() - self._logged_at > LOG_EVERY_S:
            self._logged_at = time.monotonic()
            self.context.log.info(f"{now.share:.0%}: {now.text()}")

    def note(self, sentence: str) -> None:
        """What people should know."""
        self.context.log.warning(sentence)

    def untouched(self, source: SourceFile) -> Event:
        """A partition without prompts: what is in the source stands."""
        metadata: Metadata = {**file_uri(source.uri), "prompts": "none: the file was not generated here"}
        return self._event(source.partition, source.etag, metadata)

    def generated(self, made: GeneratedFile, skipped: bool) -> Event:
        """A generated file with its numbers and picture."""
        from dflash_core.reports.plots import generation_picture  # matplotlib: a code location must load in a second

        good = made.outcomes.get("good", 0)
        metadata: Metadata = {
            **file_uri(made.completions_uri),
            "dagster/row_count": made.written,
            "sha256": made.completions.sha256,
            "prompts": made.prompts.uri,
            "prompts read": made.lines,
            "prompts dropped": made.lines - made.written,
            "drop reasons": dg.MetadataValue.json(made.dropped),
            "outcomes": dg.MetadataValue.json(made.outcomes),
            "good share": round(good / max(1, sum(made.outcomes.values())), 4),
            "cut inside the thought": made.cut_in_thought,
            "prompt tokens": made.prompt_tokens,
            "completion tokens": made.completion_tokens,
            "answers asked in this run": 0 if skipped else made.asked,
            "skipped, still valid": skipped,
            "model": made.model,
            "servers": ", ".join(made.servers),
            "seconds": made.seconds,
            "picture": picture(generation_picture(made)),
        }
        return self._event(made.partition, made.completions.sha256, metadata)

    def _event(self, partition: str, version: str, metadata: Metadata) -> Event:
        if self.alone:
            return dg.MaterializeResult(metadata=metadata, data_version=dg.DataVersion(version))
        return dg.AssetMaterialization(
            asset_key="generated_completions",
            partition=partition,
            metadata=metadata,
            tags={"dagster/data_version": version},
        )
