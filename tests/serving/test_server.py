"""A server seen from outside: each address that is not one is one sentence, and its counters are our decoder's."""

import pytest

from dflash_core.decoding.acceptance import acceptance_length
from dflash_core.errors import UserError
from dflash_core.serving.server import Counters, Server
from tests.serving.fake_server import Listen, listen

__all__ = ["listen"]
METRICS = r"""# HELP python_info Platform of the "server" {as {it} is}
# TYPE python_info gauge
python_info{version="3.12"} 1.0
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="a b}c{d \"e\" \\ f, position=\"7\""} 10.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="a b}c{d \"e\" \\ f, position=\"7\""} 6.0
# HELP vllm:spec_decode_num_drafts_created Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_created gauge
vllm:spec_decode_num_drafts_created{engine="0",model_name="x"} 1.7e+09
# HELP vllm:spec_decode_num_accepted_tokens_total Number of accepted tokens.
# TYPE vllm:spec_decode_num_accepted_tokens_total counter
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="x"} 17.0
vllm:spec_decode_num_accepted_tokens_total{engine="1",model_name="x"} 8.0
# HELP vllm:spec_decode_num_accepted_tokens_per_pos_total Accepted tokens per draft position.
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos_total counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",position="2",model_name="} \"position=9"} 1.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{model_name="x",position="0",engine="0"} 8.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="2",model_name="x"} 3.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",position="0",model_name="x"} 4.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{ engine="0", position="1", model_name="x" } 6
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",position="1",model_name="x"} 3e0 1700000000000
# TYPE vllm:e2e_request_latency_seconds histogram
vllm:e2e_request_latency_seconds_bucket{le="+Inf"} 3.0
vllm:e2e_request_latency_seconds_sum NaN
# HELP vllm:generation_tokens_total Number of generation tokens processed.
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{engine="0",model_name="x"} 30.0
vllm:generation_tokens_total{engine="1",model_name="x"} 1.5e+01
"""


def metrics(listen: Listen, text: str) -> Counters:
    """What is read from a server whose metrics are this text."""
    return Server(listen(lambda path, body: (200, text))).counters()


def test_an_address_that_is_not_a_servers_is_one_sentence(listen: Listen) -> None:
    for url in ("file:///etc/passwd", "127.0.0.1:8000", "http://169.254.169.254/latest"):
        with pytest.raises(UserError, match=r"the address of the server.* (must be an http|link-local|metadata)"):
            Server(url)
    with pytest.raises(UserError, match=r"does not answer .*is the server up"):
        Server("http://127.0.0.1:9").model(None)
    with pytest.raises(UserError, match=r"answers 404: no such page"):
        Server(listen(lambda path, body: (404, "no such page"))).model(None)
    with pytest.raises(UserError, match=r"does not answer a JSON object; is this an OpenAI-compatible server"):
        Server(listen(lambda path, body: (200, "<html>"))).model(None)
    secret = listen(lambda path, body: (200, '{"data": [{"id": "secret"}]}'))
    with pytest.raises(UserError, match=r"answers 302"):
        Server(listen(lambda path, body: (302, secret + path))).model(None)
    assert Server(secret + "/v1/").model(None) == "secret"


def test_counters_become_the_histogram_of_our_decoder() -> None:
    steps = [0, 3, 1, 1, 2, 3]
    counters = Counters(6, sum(steps), tuple(sum(s > k for s in steps) for k in range(3)), 16)
    assert counters.histogram == (1, 2, 1, 2)
    assert acceptance_length(counters.histogram) == 1 + counters.accepted / counters.drafts
    assert counters.since(counters).histogram == (0, 0, 0, 0)


def test_counters_of_several_engines_are_added_up_whatever_their_labels_hold(listen: Listen) -> None:
    counted = metrics(listen, METRICS)
    assert counted == Counters(drafts=16, accepted=25, per_position=(12, 9, 4), generated=45)
    assert counted.histogram == (4, 3, 5, 4)
    assert metrics(listen, "".join(reversed(METRICS.splitlines(keepends=True)))) == counted, "in any order"


@pytest.mark.parametrize(
    "text",
    [
        '<!DOCTYPE html>\n<html lang="en">\n<body>\n<h1>502 Bad Gateway</h1>\n</body>\n</html>\n',
        f"<html><body>{'no ' * 1000}</body></html>",
        '{"detail": "not here"}',
        "garbage",
        "\0\1\2",
        METRICS.replace("17.0", "many"),
        METRICS.replace('engine="0",position="2"', 'engine="0,position=2'),
        METRICS.replace("} 10.0", "} NaN"),
        METRICS.replace("} 10.0", "} +Inf"),
        METRICS.replace("# TYPE vllm:generation_tokens_total", "# TYPE \x85"),
    ],
    ids=[
        "an error page",
        "a long line",
        "JSON",
        "a word",
        "bytes",
        "a word as value",
        "labels",
        "NaN",
        "Inf",
        "no name",
    ],
)
def test_a_page_that_is_not_metrics_is_one_sentence(listen: Listen, text: str) -> None:
    with pytest.raises(UserError, match=r"/metrics is not in Prometheus' text form: ") as refused:
        metrics(listen, text)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 300


@pytest.mark.parametrize("text", ["", "up 1.0\n", METRICS.replace("per_pos_total", "per_place_total")])
def test_metrics_without_speculative_decoding_say_what_to_do(listen: Listen, text: str) -> None:
    with pytest.raises(UserError, match=r"/metrics counts no speculative decoding .*--speculative-config"):
        metrics(listen, text)
