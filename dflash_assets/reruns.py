"""What the clock starts: failed files again, and every night the whole lineage.

The night's stages follow each other by what has become of the runs before them, whatever that is: a bad file leaves the
night with one file less, and the gate decides whether that is enough. (Automation conditions were the alternative: they
have no cap on tries, and a condition that waits for all partitions waits forever where one stays bad.)
"""

from collections.abc import Sequence

import dagster as dg

from dflash_assets.automation import completion_files_job
from dflash_assets.drafter_checkpoint import drafter_checkpoint
from dflash_assets.drafter_eval import drafter_eval
from dflash_assets.drafter_export import drafter_export
from dflash_assets.partitions import range_request, ranges_of, sync_partitions
from dflash_assets.quarantine import FailedFile, failed_files, note_try, report_quarantine
from dflash_assets.resources import RecipeResource
from dflash_assets.training_set import training_set
from dflash_core.errors import UserError
from dflash_core.recipe import AutomationSettings
from dflash_core.shards.state import invalid_shards
from dflash_core.tokenization.tokenizer import fingerprint
from dflash_core.training_set.freeze import load_training_set
from dflash_core.workspace import Workspace

NIGHT = "dflash/night"
RERUNS_PER_TICK = 50
TRIES_PER_TICK = 1000
"""Each is an event of about 10 ms that is written before the tick ends, and Dagster gives a tick 60 s."""
RUNS_PER_NIGHT = 500

training_set_job = dg.define_asset_job(
    "training_set_job", selection=dg.AssetSelection.assets(training_set), description="Freeze and judge."
)
drafter_job = dg.define_asset_job(
    "drafter_job",
    selection=dg.AssetSelection.assets(drafter_checkpoint, drafter_eval, drafter_export),
    description="Train, evaluate and export, in one run that holds the GPU.",
)


def schedules(automation: AutomationSettings) -> list[dg.ScheduleDefinition]:
    """Both, at the times that the recipe gives."""

    @dg.schedule(job=completion_files_job, cron_schedule=automation.rerun_cron, execution_timezone=automation.timezone)
    def rerun_failed_files(
        context: dg.ScheduleEvaluationContext, recipe: RecipeResource
    ) -> list[dg.RunRequest] | dg.SkipReason:
        """Failed files again, at most `automation.max_attempts` tries of one version; then they are quarantined."""
        try:
            return _reruns(context.instance, recipe.open()) or dg.SkipReason("no failed file is due")
        except (UserError, dg.Failure) as error:
            return dg.SkipReason(str(error))

    @dg.schedule(
        job=completion_files_job, cron_schedule=automation.nightly_cron, execution_timezone=automation.timezone
    )
    def nightly_lineage(
        context: dg.ScheduleEvaluationContext, recipe: RecipeResource
    ) -> list[dg.RunRequest] | dg.SkipReason:
        """Every file without a valid shard; `nightly_stages` then goes on to training set, drafter and export."""
        night = context.scheduled_execution_time.strftime("%Y-%m-%dT%H:%M")
        try:
            return _nightly(context.instance, recipe.open(), night)
        except (UserError, dg.Failure) as error:
            return dg.SkipReason(str(error))

    return [rerun_failed_files, nightly_lineage]


@dg.sensor(jobs=[training_set_job, drafter_job], minimum_interval_seconds=30)
def nightly_stages(context: dg.SensorEvaluationContext, recipe: RecipeResource) -> dg.RunRequest | dg.SkipReason:
    """After the night's file runs, good or bad, the training set; after a passed gate the drafter."""
    latest = context.instance.get_runs(dg.RunsFilter(tags={"dagster/schedule_name": "nightly_lineage"}), limit=1)
    if not latest:
        return dg.SkipReason("no night yet")
    night = latest[0].tags[NIGHT]
    runs = context.instance.get_runs(dg.RunsFilter(tags={NIGHT: night}))
    unfinished = [run for run in runs if not run.is_finished]
    if unfinished:
        return dg.SkipReason(f"night {night}: {len(unfinished)} runs to go")
    done = {run.job_name: run for run in reversed(runs)}  # listed newest first; a retry stands for what it repeats
    for job in (training_set_job.name, drafter_job.name):
        if job not in done:
            return dg.RunRequest(run_key=f"{night} {job}", job_name=job, tags={NIGHT: night})
        if not done[job].is_success:
            return dg.SkipReason(f"night {night}: {job} failed")
        if job == training_set_job.name:
            try:
                verdict = load_training_set(recipe.open().derived).verdict
            except (UserError, dg.Failure) as error:
                return dg.SkipReason(f"night {night}: {error}")
            if not verdict.passed:
                return dg.SkipReason(f"night {night}: no training, the gate failed: {'; '.join(verdict.reasons)}")
    return dg.SkipReason(f"night {night} is done")


def _reruns(instance: dg.DagsterInstance, workspace: Workspace) -> list[dg.RunRequest]:
    etags = {source.partition: source.etag for source in sync_partitions(instance, workspace).sources}
    failed = failed_files(instance, etags, workspace.recipe.automation.max_attempts)
    report_quarantine(instance, failed)
    due = _first_tries(failed)
    if due:
        fingerprint(workspace.recipe)  # where recipe and target are of no use, no file is asked for
    ranges = ranges_of(instance, due)[:RERUNS_PER_TICK]
    for partition in (key for keys in ranges for key in keys):
        note_try(instance, due[partition], etags[partition])
    return [range_request(keys) for keys in ranges]


def _first_tries(failed: Sequence[FailedFile]) -> dict[str, FailedFile]:
    """Those that may be tried again, as many as a tick can write down."""
    return {file.partition: file for file in [file for file in failed if not file.quarantined][:TRIES_PER_TICK]}


def _nightly(instance: dg.DagsterInstance, workspace: Workspace, night: str) -> list[dg.RunRequest]:
    """The night's file runs; where nothing is due one file that is skipped in milliseconds begins the night."""
    sources = sync_partitions(instance, workspace).sources
    if not sources:
        raise UserError("there is no file of completions yet")
    etags = {source.partition: source.etag for source in sources}
    failed = failed_files(instance, etags, workspace.recipe.automation.max_attempts)
    again, held = _first_tries(failed), {file.partition for file in failed}
    recipe = workspace.recipe
    due = [
        partition
        for partition in invalid_shards(workspace.derived, fingerprint(recipe), sources, recipe.storage.downloads)
        if partition not in held or partition in again
    ]
    ranges = ranges_of(instance, due or [sources[0].partition])[:RUNS_PER_NIGHT]
    for partition in (key for keys in ranges for key in keys if key in again):
        note_try(instance, again[partition], etags[partition])
    return [range_request(keys, f"{night} {keys[0]}", {NIGHT: night}) for keys in ranges]
