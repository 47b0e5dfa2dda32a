"""Asking a running Dagster through its public GraphQL API: materialize, backfill, wait, read what became of it."""

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx2

from dflash_assets.partitions import RANGE_END, RANGE_START
from dflash_core.errors import UserError
from dflash_core.http import open_client

LOCATION = "dflash"
POLL_S = 0.5
ENDED = ("COMPLETED", "COMPLETED_SUCCESS", "COMPLETED_FAILED", "FAILED", "CANCELED")
TIMEOUT_S = 30.0

LOADED = """query { workspaceOrError { __typename ... on Workspace { locationEntries {
  loadStatus locationOrLoadError { __typename ... on PythonError { message } } } } } }"""
LAUNCH_RUN = """mutation($params: ExecutionParams!) { launchRun(executionParams: $params) { __typename
  ... on LaunchRunSuccess { run { runId } } ... on PythonError { message }
  ... on RunConfigValidationInvalid { errors { message } } ... on InvalidSubsetError { message } } }"""
LAUNCH_BACKFILL = """mutation($params: LaunchBackfillParams!) { launchPartitionBackfill(backfillParams: $params) {
  __typename ... on LaunchBackfillSuccess { backfillId } ... on PythonError { message }
  ... on PartitionKeysNotFoundError { message } } }"""
RUN = """query($id: ID!) { runOrError(runId: $id) { __typename ... on Run { status
  eventConnection(limit: 1000) { events { __typename ... on MessageEvent { message }
    ... on ExecutionStepFailureEvent { error { message } failureMetadata { description } }
    ... on RunFailureEvent { error { message } } } } } } }"""
RUN_STATUS = "query($id: ID!) { runOrError(runId: $id) { __typename ... on Run { status } } }"
BACKFILL = """query($id: String!) { partitionBackfillOrError(backfillId: $id) { __typename
  ... on PartitionBackfill { status runs(limit: 1000) { runId } error { message } }
  ... on PythonError { message } } }"""
MATERIALIZATION = """query($key: AssetKeyInput!, $partition: String!) { assetNodeOrError(assetKey: $key) { __typename
  ... on AssetNode { assetMaterializations(partitions: [$partition], limit: 1) { timestamp } } } }"""
PARTITIONS = """query($key: AssetKeyInput!) { assetNodeOrError(assetKey: $key) { __typename ... on AssetNode {
  partitionStats { numPartitions numMaterialized numFailed } } } }"""
START_SENSOR = """mutation($selector: SensorSelector!) { startSensor(sensorSelector: $selector) { __typename
  ... on PythonError { message } } }"""
START_SCHEDULE = """mutation($selector: ScheduleSelector!) { startSchedule(scheduleSelector: $selector) { __typename
  ... on PythonError { message } } }"""
STARTED_RUNS = """query { runsOrError(filter: { statuses: [STARTING, STARTED, CANCELING] }) { __typename
  ... on Runs { results { runId jobName assetSelection { path } } } } }"""
TERMINATE = """mutation($runs: [String!]!) { terminateRuns(runIds: $runs) { __typename
  ... on PythonError { message } } }"""
REPOSITORY = {"repositoryLocationName": LOCATION, "repositoryName": "__repository__"}


@dataclass(frozen=True)
class StartedRun:
    """A run that works at this moment."""

    run: str
    job: str
    assets: frozenset[str]
    """What it was asked for; empty: all of its job."""


@dataclass(frozen=True)
class RunEnd:
    """How a run ended."""

    run: str
    succeeded: bool
    reason: str
    """The failure's own sentence; empty where it succeeded."""


@dataclass(frozen=True)
class Dagster:
    """A Dagster webserver at `url`."""

    url: str

    def answers(self) -> bool:
        """Whether anything answers there yet."""
        try:
            self.ask("query { version }")
        except UserError:
            return False
        return True

    def wait_until_loaded(self, timeout_s: float = 120.0) -> None:
        """Until the code location is loaded.

        Raises:
            UserError: it cannot be loaded (its own message), or not in time.
        """
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            entries = self.ask(LOADED)["workspaceOrError"].get("locationEntries", [])
            for entry in entries:
                problem = (entry["locationOrLoadError"] or {}).get("message")
                if problem:
                    raise UserError(f"the code location does not load: {problem.strip().splitlines()[-1]}")
            if entries and all(entry["loadStatus"] == "LOADED" for entry in entries):
                return
            time.sleep(POLL_S)
        raise UserError(f"the code location at {self.url} is not loaded after {timeout_s:.0f} s")

    def materialize(
        self,
        assets: Sequence[str],
        partition: str | None = None,
        config: Mapping[str, Any] | None = None,
        last: str | None = None,
    ) -> str:
        """Launch one run, over one partition or all from `partition` to `last`; its id.

        Raises:
            UserError: Dagster refuses.
        """
        names = {"dagster/partition": partition}
        if last is not None:
            names = {RANGE_START: partition, RANGE_END: last}
        tags = [{"key": name, "value": value} for name, value in names.items() if value is not None]
        answer = self.ask(
            LAUNCH_RUN,
            params={
                "selector": {
                    **REPOSITORY,
                    "pipelineName": "__ASSET_JOB",
                    "assetSelection": [{"path": [asset]} for asset in assets],
                },
                "runConfigData": dict(config or {}),
                "mode": "default",
                "executionMetadata": {"tags": tags},
            },
        )["launchRun"]
        if answer["__typename"] != "LaunchRunSuccess":
            raise UserError(f"Dagster refuses to materialize {', '.join(assets)}: {json.dumps(answer)}")
        return str(answer["run"]["runId"])

    def backfill(self, assets: Sequence[str], partitions: Sequence[str]) -> str:
        """Launch a backfill; its id.

        Raises:
            UserError: Dagster refuses.
        """
        answer = self.ask(
            LAUNCH_BACKFILL,
            params={
                "assetSelection": [{"path": [asset]} for asset in assets],
                "partitionNames": list(partitions),
                "tags": [],
            },
        )["launchPartitionBackfill"]
        if answer["__typename"] != "LaunchBackfillSuccess":
            raise UserError(f"Dagster refuses the backfill of {', '.join(assets)}: {json.dumps(answer)}")
        return str(answer["backfillId"])

    def wait_for_run(self, run: str, timeout_s: float, on_poll: Callable[[str], None] = lambda status: None) -> RunEnd:
        """Until the run ends; `on_poll` gets its status.

        Raises:
            UserError: not in time.
        """
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            status = self.ask(RUN_STATUS, id=run)["runOrError"]["status"]
            on_poll(status)
            if status in ("SUCCESS", "FAILURE", "CANCELED"):
                return RunEnd(run, status == "SUCCESS", "" if status == "SUCCESS" else self._why(run))
            time.sleep(POLL_S)
        raise UserError(f"run {run} did not end within {timeout_s:.0f} s; look at {self.url}/runs/{run}")

    def wait_for_backfill(self, backfill: str, timeout_s: float, on_poll: Callable[[], None]) -> list[RunEnd]:
        """Until the backfill ends; how each of its runs ended.

        Raises:
            UserError: not in time, or the backfill itself failed.
        """
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            answer = self.ask(BACKFILL, id=backfill)["partitionBackfillOrError"]
            on_poll()
            if answer["status"] in ENDED:
                runs = [self.wait_for_run(run["runId"], TIMEOUT_S) for run in answer["runs"]]
                if answer["status"] != "COMPLETED_SUCCESS" and all(run.succeeded for run in runs):
                    raise UserError(f"backfill {backfill} ended as {answer['status']}: {answer['error']}")
                return runs
            time.sleep(POLL_S)
        raise UserError(
            f"backfill {backfill} did not end within {timeout_s:.0f} s; look at {self.url}/overview/backfills"
        )

    def switch_on(self, sensors: Iterable[str], schedules: Iterable[str]) -> None:
        """Start sensors and schedules.

        Raises:
            UserError: there is none of that name.
        """
        for name in sensors:
            self.ask(START_SENSOR, selector={**REPOSITORY, "sensorName": name})
        for name in schedules:
            self.ask(START_SCHEDULE, selector={**REPOSITORY, "scheduleName": name})

    def started_runs(self) -> list[StartedRun]:
        """Runs that work at this moment."""
        return [
            StartedRun(run["runId"], run["jobName"], frozenset(key["path"][-1] for key in run["assetSelection"] or ()))
            for run in self.ask(STARTED_RUNS)["runsOrError"]["results"]
        ]

    def terminate(self, runs: Sequence[str]) -> None:
        """Ask runs to end; they do so in their own time."""
        self.ask(TERMINATE, runs=list(runs))

    def partitions(self, asset: str) -> tuple[int, int, int]:
        """(all, materialized, failed) partitions of an asset."""
        stats = self.ask(PARTITIONS, key={"path": [asset]})["assetNodeOrError"]["partitionStats"]
        return stats["numPartitions"], stats["numMaterialized"], stats["numFailed"]

    def last_materialization(self, asset: str, partition: str) -> str | None:
        """When the partition was last materialized (milliseconds, as Dagster writes them)."""
        found = self.ask(MATERIALIZATION, key={"path": [asset]}, partition=partition)["assetNodeOrError"]
        return next((str(one["timestamp"]) for one in found["assetMaterializations"]), None)

    def ask(self, query: str, **variables: Any) -> dict[str, Any]:
        """One GraphQL request.

        Raises:
            UserError: no answer, or errors in it.
        """
        try:
            with open_client(self.url, TIMEOUT_S) as client:
                response = client.post(f"{self.url}/graphql", json={"query": query, "variables": variables})
            if not response.is_success:
                raise UserError(f"Dagster at {self.url} answers {response.status_code}: {response.text[:2000]}")
            answer = response.json()
        except (httpx2.HTTPError, OSError, ValueError) as error:
            raise UserError(f"Dagster at {self.url} does not answer: {error}") from None
        if "errors" in answer:
            raise UserError(f"Dagster at {self.url}: {answer['errors'][0]['message']}")
        data: dict[str, Any] = answer["data"]
        for part in data.values():
            if isinstance(part, dict) and part.get("__typename", "").endswith(("NotFoundError", "PythonError")):
                raise UserError(f"Dagster at {self.url}: {part.get('message', part['__typename'])}")
        return data

    def _why(self, run: str) -> str:
        events = self.ask(RUN, id=run)["runOrError"]["eventConnection"]["events"]
        for event in events:
            if event["__typename"] == "ExecutionStepFailureEvent":
                described = (event["failureMetadata"] or {}).get("description")
                return str(described or event["error"]["message"])
        messages = [event["message"] for event in events if event["__typename"] == "RunFailureEvent"]
        return str(messages[-1] if messages else f"see {self.url}/runs/{run}")
