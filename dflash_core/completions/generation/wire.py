"""One request to one server through the `openai` client, and what its answer, or its refusal, means.

Streaming is off, redirects are not followed, proxies and OPENAI_* variables are not read, and every connection is made
to an address that was checked after it was resolved. No text that leaves this module contains the key.
"""

import asyncio
import socket
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Literal

import httpcore2
import httpx2
import openai
import orjson
from pydantic import SecretStr

from dflash_core.completions.generation.answers import Answer, Plan, Request, sampling_fields
from dflash_core.completions.generation.prompts import Prompt, wire_messages
from dflash_core.completions.normalize import FINISH_REASONS, tool_calls_of
from dflash_core.completions.record import Json, Refused
from dflash_core.errors import UserError
from dflash_core.recipe import Generation
from dflash_core.storage.addresses import check_url, is_refused

KEEPALIVE_S = 4.0
"""Below the five seconds after which common servers close an idle connection."""
SHOWN_CHARS = 300
HEADERS = frozenset({"host", "content-type", "content-length", "accept", "accept-encoding", "connection", "user-agent"})


class ServerRefuses(UserError):
    """A server cannot be used as the recipe says: key, model, path, redirect, address."""


class Trouble(Exception):
    """A request without a usable answer. `kind` decides what follows; the text is for people and holds no key."""

    def __init__(
        self,
        kind: Literal["refused", "overloaded", "failed"],
        text: str,
        rest_s: float = 0.0,
        *,
        timed_out: bool = False,
    ) -> None:
        super().__init__(text)
        self.kind = kind
        """refused: this prompt, for good; overloaded: later; failed: again, a few times."""
        self.rest_s = rest_s
        """How long the server asks to be left alone."""
        self.timed_out = timed_out
        """It took the request and did not answer in time: no sign that it is gone."""


class CheckedBackend(httpcore2.AsyncNetworkBackend):
    """Resolves names itself and connects only to addresses that may be talked to."""

    def __init__(self) -> None:
        self._inner = httpcore2.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore2.SOCKET_OPTION] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        """Connect to the first address of the host that answers; a refused one among them refuses the host."""
        try:
            found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise httpcore2.ConnectError(f"{host} cannot be resolved: {error}") from error
        addresses = [str(entry[4][0]) for entry in found]
        for address in addresses:
            if is_refused(address):
                raise ServerRefuses(f"{host} is {address}, a link-local or metadata address, which is never talked to")
        for last, address in enumerate(addresses, 1 - len(addresses)):
            try:
                return await self._inner.connect_tcp(address, port, timeout, local_address, socket_options)
            except (httpcore2.ConnectError, httpcore2.ConnectTimeout):
                if last == 0:
                    raise
        raise httpcore2.ConnectError(f"{host} has no address")

    async def sleep(self, seconds: float) -> None:
        """As it is."""
        await asyncio.sleep(seconds)


class Connection:
    """The way to one server.

    Args:
        url: its base URL.
        generation: the recipe's section.
        key: sent as bearer token; None: no key.

    Raises:
        RecipeError: the URL is none that may be talked to.
    """

    def __init__(self, url: str, generation: Generation, key: SecretStr | None) -> None:
        check_url(url, "generation.servers:")
        self.url = url
        self.gives_token_ids = generation.token_ids
        self._generation = generation
        self._key = key
        transport = httpx2.AsyncHTTPTransport(trust_env=False)
        # The transport's constructor has no argument for the backend, its pool has.
        transport._pool = httpcore2.AsyncConnectionPool(
            ssl_context=httpx2.create_ssl_context(trust_env=False),
            max_connections=None,
            max_keepalive_connections=None,
            keepalive_expiry=KEEPALIVE_S,
            network_backend=CheckedBackend(),
        )
        timeout = httpx2.Timeout(generation.request_timeout_s, connect=generation.connect_timeout_s, pool=None)
        self._client = openai.AsyncOpenAI(
            base_url=url,
            api_key=key.get_secret_value() if key is not None else "none",
            admin_api_key="",
            organization="",
            project="",
            max_retries=0,
            http_client=httpx2.AsyncClient(
                transport=transport,
                follow_redirects=False,
                trust_env=False,
                timeout=timeout,
                event_hooks={"request": [self._strip]},
            ),
        )

    async def _strip(self, request: httpx2.Request) -> None:
        """Leave only what a server needs: the client adds headers from OPENAI_CUSTOM_HEADERS, and some about us."""
        for name in set(request.headers) - HEADERS:
            del request.headers[name]
        if self._key is not None:
            request.headers["authorization"] = f"Bearer {self._key.get_secret_value()}"

    async def close(self) -> None:
        """Close all connections."""
        await self._client.close()

    async def ask(self, prompt: Prompt, request: Request, plan: Plan) -> Answer:
        """Send one request; a usable answer, or Trouble, or ServerRefuses.

        Where it is refused with the wish for token ids and answered without, they are not asked for any more.
        """
        body: dict[str, Json] = {"model": plan.generation.model, "messages": wire_messages(prompt.messages)}
        body |= sampling_fields(plan.generation.sampling) | {"max_tokens": request.max_tokens, "stream": False}
        if request.seed is not None:
            body["seed"] = request.seed
        if prompt.tools:
            body["tools"] = prompt.tools
        if plan.template_options:
            body["chat_template_kwargs"] = plan.template_options
        if self.gives_token_ids:
            body["return_token_ids"] = True
        began = time.monotonic()
        try:
            answer = await self._send("POST", "/chat/completions", body)
        except Trouble as trouble:
            if trouble.kind != "refused" or not body.pop("return_token_ids", False):
                raise
            answer = await self._send("POST", "/chat/completions", body)
            self.gives_token_ids = False
        return self._read(answer, time.monotonic() - began, plan.generation.model)

    async def models(self) -> list[Mapping[str, Json]]:
        """What the server says it serves."""
        answer = await self._send("GET", "/models", None)
        entries = answer.get("data")
        return [entry for entry in entries if type(entry) is dict] if type(entries) is list else []

    def scrub(self, text: str) -> str:
        """The text without the key, on one line and not too long."""
        if self._key is not None:
            text = text.replace(self._key.get_secret_value(), "***")
        return " ".join(text.split())[:SHOWN_CHARS]

    async def _send(self, method: Literal["GET", "POST"], path: str, body: Json) -> dict[str, Json]:
        try:
            async with asyncio.timeout(self._generation.request_timeout_s):
                if method == "GET":
                    response = await self._client.get(path, cast_to=httpx2.Response)
                else:
                    response = await self._client.post(path, cast_to=httpx2.Response, body=body)
        except openai.APIStatusError as error:
            raise self._of_status(error.response) from None
        except (openai.APITimeoutError, TimeoutError) as error:
            if isinstance(error.__cause__, httpx2.ConnectTimeout):
                raise Trouble("failed", f"no connection within {self._generation.connect_timeout_s:g} s") from None
            text = f"no answer within {self._generation.request_timeout_s:g} s"
            raise Trouble("overloaded", text, timed_out=True) from None
        except openai.APIConnectionError as error:
            cause = error.__cause__ or error
            if isinstance(cause, ServerRefuses):
                raise cause from None
            raise Trouble("failed", self.scrub(f"{type(cause).__name__}: {cause}")) from None
        if response.status_code >= 300:
            raise self._of_status(response)
        try:
            answer = orjson.loads(response.content)
        except ValueError:
            raise Trouble("failed", self.scrub(f"an answer that is no JSON: {response.text[:80]!r}")) from None
        if type(answer) is not dict:
            raise Trouble("failed", "an answer that is no JSON object")
        return answer

    def _of_status(self, response: httpx2.Response) -> Trouble | ServerRefuses:
        status, said = response.status_code, self.scrub(_message(response))
        if 300 <= status < 400:
            place = self.scrub(response.headers.get("location", "nowhere"))
            return ServerRefuses(f"{self.url} redirects to {place}, which is not followed; give the final address")
        if status in (401, 403):
            return ServerRefuses(
                f"{self.url} refuses the key ({status}: {said}); set the variable that the recipe names"
            )
        if status in (404, 405):
            return ServerRefuses(
                f"{self.url} has no such model or path ({status}: {said}); base URLs end in /v1 as a rule"
            )
        if status in (429, 503, 529):
            return Trouble("overloaded", f"{status}: {said}", _retry_after(response))
        if status >= 500 or status in (408, 409, 425):
            return Trouble("failed", f"{status}: {said}")
        return Trouble("refused", f"{status}: {said}")

    def _read(self, answer: dict[str, Json], seconds: float, model: str) -> Answer:
        try:
            choice = answer["choices"][0]
            message, usage = choice["message"], answer.get("usage") or {}
            if choice.get("finish_reason") == "content_filter":
                raise Trouble("refused", "content_filter")
            reasoning = message.get("reasoning_content") or message.get("reasoning")
            prompt_ids = answer.get("prompt_token_ids") or choice.get("prompt_token_ids")
            return Answer(
                content=message.get("content") or "",
                reasoning=reasoning or None,
                tool_calls=tool_calls_of(message["tool_calls"]) if message.get("tool_calls") else (),
                finish_reason=FINISH_REASONS[choice["finish_reason"]],
                prompt_tokens=usage.get("prompt_tokens") or 0,
                completion_tokens=usage.get("completion_tokens") or 0,
                prompt_token_ids=prompt_ids or None,
                completion_token_ids=choice.get("token_ids") or None,
                model=model,
                server=self.url,
                seconds=round(seconds, 3),
            )
        except Refused as error:
            raise Trouble("failed", self.scrub(f"a malformed answer: {error}")) from None
        except (LookupError, TypeError, AttributeError, ValueError) as error:
            raise Trouble("failed", self.scrub(f"a malformed answer: {type(error).__name__} {error}")) from None


def _message(response: httpx2.Response) -> str:
    """The sentence in an error's body, in whichever form the server gives it."""
    text = response.text
    with suppress(ValueError, AttributeError):
        body = orjson.loads(text)
        said = body.get("error", body.get("detail", body.get("message", text)))
        text = str(said.get("message", said) if type(said) is dict else said)
    return text


def _retry_after(response: httpx2.Response) -> float:
    try:
        return max(0.0, float(response.headers.get("retry-after", 0)))
    except ValueError:
        return 0.0  # a date: the back-off does as well
