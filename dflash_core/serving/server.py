"""An OpenAI-compatible server with a drafter, seen from outside: completions of token ids, and what its metrics count.

The trade-off: prompts go as token ids to /v1/completions, so that no template or tokenizer of the server's comes
between; acceptance is read as the difference of counters around the requests, so nobody else may use it meanwhile.
The counters are vLLM's: a *draft* is one verification step of one request, counted before a stop token or the token
limit cuts the output; the step that reads the prompt does not count.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx2
from prometheus_client.parser import text_string_to_metric_families

from dflash_core.errors import UserError
from dflash_core.http import check_resolved, open_client

TIMEOUT_S = 600.0
PROBE_TIMEOUT_S = 5.0
DRAFTS = "vllm:spec_decode_num_drafts_total"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
GENERATED = "vllm:generation_tokens_total"


@dataclass(frozen=True)
class Counters:
    """What the server has counted since it started, over all its engines."""

    drafts: int
    accepted: int
    per_position: tuple[int, ...]
    """[K-1] drafts whose proposals up to this one were accepted."""
    generated: int
    """Tokens given out."""

    def since(self, before: "Counters") -> "Counters":
        """What was counted between `before` and now."""
        return Counters(
            self.drafts - before.drafts,
            self.accepted - before.accepted,
            tuple(now - then for now, then in zip(self.per_position, before.per_position, strict=True)),
            self.generated - before.generated,
        )

    @property
    def histogram(self) -> tuple[int, ...]:
        """[K] drafts of which 0, 1, ... K-1 proposals were accepted, as our decoder counts them."""
        reached = (self.drafts, *self.per_position, 0)
        return tuple(reached[k] - reached[k + 1] for k in range(len(reached) - 1))


@dataclass(frozen=True)
class ServedAnswer:
    """One answer."""

    tokens: tuple[int, ...] | None
    """Its token ids, the stop token included; None where the server does not return them."""
    count: int
    """How many tokens it says it gave."""


@dataclass(frozen=True)
class Server:
    """A server at `url`, with or without a trailing /v1."""

    url: str

    def __post_init__(self) -> None:
        check_resolved(self.url, "the address of the server")

    def answers(self) -> bool:
        """Whether it says that it is ready."""
        try:
            self._ask("/health", timeout_s=PROBE_TIMEOUT_S)
        except UserError:
            return False
        return True

    def model(self, wanted: str | None) -> str:
        """The name of the served model.

        Args:
            wanted: a name that must be among the served; None: the only one.

        Raises:
            UserError: no server there, another model, or several and none was named.
        """
        answer = self._json("/v1/models")
        names = [str(entry["id"]) for entry in answer.get("data", [])]
        if (wanted is None and len(names) != 1) or (wanted is not None and wanted not in names):
            raise UserError(
                f"{self.url} serves {', '.join(names) or 'no model'}, not {wanted or 'exactly one'}; "
                "name one of them with --model"
            )
        return wanted or names[0]

    def complete(self, model: str, prompt: Sequence[int], max_tokens: int, stop: Sequence[int]) -> ServedAnswer:
        """The greedy continuation of a prompt of token ids.

        Raises:
            UserError: the server refuses; the sentence holds its own.
        """
        body = {
            "model": model,
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0,
            "stop_token_ids": sorted(stop),
            "return_token_ids": True,
        }
        answer = self._json("/v1/completions", body)
        try:
            tokens = answer["choices"][0].get("token_ids")
            return ServedAnswer(None if tokens is None else tuple(tokens), int(answer["usage"]["completion_tokens"]))
        except (KeyError, IndexError, TypeError):
            raise UserError(f"{self.url}/v1/completions answers in another form: {str(answer)[:200]}") from None

    def tokenize(self, model: str, text: str) -> tuple[int, ...] | None:
        """The server's own token ids of a text, without added ones; None where it has no such call."""
        try:
            answer = self._json("/tokenize", {"model": model, "prompt": text, "add_special_tokens": False})
        except UserError:
            return None
        tokens = answer.get("tokens")
        return tuple(tokens) if isinstance(tokens, list) else None

    def counters(self) -> Counters:
        """Speculative decoding so far.

        Raises:
            UserError: no metrics, or none of speculative decoding.
        """
        text = self._ask("/metrics").text
        try:
            counters = _counters(text)
        except (ValueError, IndexError, OverflowError) as error:  # what the parser raises; a value that is not a number
            reason = str(error)[:200]
            raise UserError(f"{self.url}/metrics is not in Prometheus' text form: {reason}") from None
        if counters is None:
            raise UserError(
                f"{self.url}/metrics counts no speculative decoding ({DRAFTS}); start the server with the drafter "
                "(--speculative-config) and with its metrics on"
            )
        return counters

    def _json(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        try:
            table = self._ask(path, body).json()
        except ValueError:
            table = None
        if not isinstance(table, dict):
            raise UserError(f"{self.url}{path} does not answer a JSON object; is this an OpenAI-compatible server?")
        return table

    def _ask(self, path: str, body: dict[str, Any] | None = None, timeout_s: float = TIMEOUT_S) -> httpx2.Response:
        url = self.url.rstrip("/").removesuffix("/v1") + path
        try:
            with open_client(url, timeout_s) as client:
                answer = client.get(url) if body is None else client.post(url, json=body)
        except (httpx2.HTTPError, httpx2.InvalidURL, OSError) as error:
            reason = str(error) or type(error).__name__
            raise UserError(f"{url} does not answer ({reason}); is the server up, and is this its address?") from None
        if not answer.is_success:
            words = answer.text[:300].replace("\n", " ")
            raise UserError(f"{url} answers {answer.status_code}: {words}")
        return answer


def _counters(text: str) -> Counters | None:
    """The counters in Prometheus' text form, those of all engines added up; None: none of speculative decoding."""
    sums: dict[str, float] = defaultdict(float)
    positions: dict[int, float] = defaultdict(float)
    for sample in (sample for family in text_string_to_metric_families(text) for sample in family.samples):
        sums[sample.name] += sample.value
        if sample.name == PER_POSITION and sample.labels.get("position", "").isdigit():
            positions[int(sample.labels["position"])] += sample.value
    if DRAFTS not in sums or not positions:
        return None
    return Counters(
        int(sums[DRAFTS]),
        int(sums[ACCEPTED]),
        tuple(int(positions[k]) for k in range(len(positions))),
        int(sums[GENERATED]),
    )
