"""A failed run is told to the webhook, with every bad file and its reason; a webhook that fails harms nothing."""

import json
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import dagster as dg
import pytest
from pydantic import SecretStr

from dflash_assets.alerts import alert_sensor, post
from dflash_core.recipe import AlertSettings, load_recipe
from dflash_core.records import SourceFile
from dflash_core.storage.s3 import Store

Materialize = Callable[[Sequence[str]], dg.ExecuteInProcessResult]
Sync = Callable[[], tuple[SourceFile, ...]]
Rows = Callable[..., bytes]
Tell = Callable[..., None]
SECRET = "T0KEN/only-the-recipe-knows"


class Webhook(ThreadingHTTPServer):
    """A local server that keeps what it is told."""

    told: list[dict[str, object]]
    status = 200


@pytest.fixture
def webhook() -> Iterator[Webhook]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            server.told.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(server.status)
            self.send_header("Location", f"http://127.0.0.1:{server.server_port}/elsewhere")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    server = Webhook(("127.0.0.1", 0), Handler)
    server.told = []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def tell(
    instance: dg.DagsterInstance, recipe_file: Path, source: Store, materialize: Materialize, sync: Sync, rows: Rows
) -> Tell:
    """A run with a bad file, and the sensor that sees it fail."""

    def run(url: str | None, form: str = "json", broken: bool = False) -> None:
        for name in ("a", "b"):
            source.put(f"{name}.jsonl", rows(4, name))
        source.put("bad, file.jsonl", b"not json\n")
        partitions = sorted(file.partition for file in sync())
        if url is not None:
            with recipe_file.open("a") as file:
                file.write(f'[alerts]\nwebhook_url = "{url}"\nformat = "{form}"\nui_url = "http://127.0.0.1:3000/"\n')
                file.write("timeout_s = 2\n")
        sensor = alert_sensor(load_recipe(recipe_file).alerts)
        if broken:
            recipe_file.write_text("no recipe any more")
        result = materialize(partitions)
        context = dg.build_run_status_sensor_context(
            sensor_name="tell_of_failed_runs",
            dagster_event=next(event for event in result.all_events if event.event_type_value == "PIPELINE_FAILURE"),
            dagster_instance=instance,
            dagster_run=result.dagster_run,
        )
        with context.for_run_failure() as failure:
            sensor(failure)

    return run


def test_every_bad_file_is_told_with_its_reason(webhook: Webhook, tell: Tell) -> None:
    tell(f"http://127.0.0.1:{webhook.server_port}/{SECRET}")
    (told,) = webhook.told
    assert isinstance(told["failed"], dict)
    assert list(told["failed"]) == ["bad%2C%20file"]
    assert "invalid JSON" in told["failed"]["bad%2C%20file"]
    assert "1 of 3 files failed" in str(told["reason"])
    assert told["url"] == f"http://127.0.0.1:3000/runs/{told['run']}"


def test_a_broken_recipe_is_told_too(webhook: Webhook, tell: Tell) -> None:
    tell(f"http://127.0.0.1:{webhook.server_port}/{SECRET}", broken=True)
    (told,) = webhook.told
    assert "cannot be read" in str(told["reason"])


def test_slack_gets_text(webhook: Webhook, tell: Tell) -> None:
    tell(f"http://127.0.0.1:{webhook.server_port}/{SECRET}", "slack")
    (told,) = webhook.told
    assert list(told) == ["text"]
    assert "• bad%2C%20file: " in str(told["text"])


@pytest.mark.parametrize(("how", "problem"), [("refuses", "it answered 500"), ("nobody there", "cannot be reached")])
def test_a_failing_webhook_harms_nothing_and_its_address_is_not_told(
    webhook: Webhook, tell: Tell, how: str, problem: str, capfd: pytest.CaptureFixture[str]
) -> None:
    webhook.status = 500
    url = f"http://127.0.0.1:{webhook.server_port if how == 'refuses' else 9}/{SECRET}"
    tell(url)
    alerts = AlertSettings(webhook_url=SecretStr(url))
    assert problem in str(post(alerts, {"job": "j"}))
    assert SECRET not in str(post(alerts, {"job": "j"})) + repr(alerts) + alerts.model_dump_json()
    assert SECRET not in "".join(capfd.readouterr())


def test_a_redirect_is_not_followed_nor_a_proxy_asked(webhook: Webhook, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    url = SecretStr(f"http://127.0.0.1:{webhook.server_port}/{SECRET}?key=1")
    assert post(AlertSettings(webhook_url=url), {"job": "j"}) is None
    webhook.status = 302
    assert post(AlertSettings(webhook_url=url), {"job": "j"}) == "it answered 302"
    assert len(webhook.told) == 2


@pytest.mark.parametrize("host", ["169.254.169.254", "2852039166", "[fd00:ec2::254]", "[::ffff:169.254.169.254]"])
def test_a_metadata_service_is_not_told(host: str) -> None:
    assert "metadata" in str(post(AlertSettings(webhook_url=SecretStr(f"http://{host}/{SECRET}")), {"job": "j"}))


@pytest.mark.parametrize(
    ("address", "kind"),
    [(f"/a {SECRET}", "ConnectError"), (f"/a\n{SECRET}", "InvalidURL"), (f"{SECRET}/", "InvalidURL")],
    ids=["a space", "a line break", "no port"],
)
def test_what_http_itself_refuses_is_not_told_either(address: str, kind: str) -> None:
    """The refusal of httpx2 quotes a port that is not a number."""
    problem = str(post(AlertSettings(webhook_url=SecretStr(f"http://127.0.0.1:9{address}")), {"job": "j"}))
    assert problem == f"it cannot be reached ({kind})"


def test_a_slow_webhook_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/"
        assert "no answer within 0.2 s" in str(
            post(AlertSettings(webhook_url=SecretStr(url), timeout_s=0.2), {"job": "j"})
        )


def test_without_a_webhook_nobody_is_told(webhook: Webhook, tell: Tell) -> None:
    tell(None)
    assert webhook.told == []
