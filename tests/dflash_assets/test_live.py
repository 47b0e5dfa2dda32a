"""A running training is seen in Dagster before it ends."""

import subprocess
import sys
from pathlib import Path

import dagster as dg

from dflash_assets.live import observed

PROGRAM = """
import sys, time
from pathlib import Path
from dagster_pipes import open_dagster_pipes
with open_dagster_pipes() as pipes:
    pipes.report_custom_message({"train/loss": 2.5, "held_out/accepted_prefix": 1.4996789, "step": 123456})
    while not Path(sys.argv[1]).exists():
        time.sleep(0.05)
    pipes.report_custom_message({"train/loss": 2.0})
"""


def test_numbers_are_observations_while_the_process_runs(tmp_path: Path) -> None:
    instance, go, seen_early = dg.DagsterInstance.ephemeral(), tmp_path / "go", []

    def observations() -> list[dict[str, object]]:
        found = instance.fetch_observations(dg.AssetKey("training"), limit=10).records
        events = [record.asset_observation for record in reversed(found)]
        return [{name: value.value for name, value in e.metadata.items()} for e in events if e is not None]

    @dg.asset
    def training(context: dg.AssetExecutionContext) -> dg.MaterializeResult[None]:
        with (
            dg.open_pipes_session(
                context=context,
                context_injector=dg.PipesTempFileContextInjector(),
                message_reader=dg.PipesTempFileMessageReader(),
            ) as session,
            observed(context, dg.AssetKey("training"), session),
        ):
            environment = session.get_bootstrap_env_vars()
            process = subprocess.Popen([sys.executable, "-c", PROGRAM, str(go)], env=environment)
            while not observations():
                assert process.poll() is None, "the process ended before anything was seen"
            seen_early.extend(observations())
            go.touch()
            assert process.wait() == 0
        return dg.MaterializeResult()

    assert dg.materialize([training], instance=instance).success
    assert seen_early == [{"train loss": 2.5, "held out accepted prefix": 1.5, "step": 123456.0}]
    assert observations() in (seen_early, [*seen_early, {"train loss": 2.0}])
