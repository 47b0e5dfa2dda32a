"""One request to one server, and what its answer, or its refusal, means.

Streaming is off, redirects are not followed, nothing is read from the environment, and every connection is made to an
address that was checked after it was resolved (`http`). No text that leaves this module contains the key.
"""

import asyncio
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Literal

import httpx2
import orjson
from pydantic import SecretStr

from dflash_core.completions.completion import Json, Rejected
from dflash_core.completions.normalize import FINISH_REASONS, tool_calls_of
from dflash_core.errors import UserError
from dflash_core.generation.answers import Answer, Plan, Request, sampling_fields
from dflash_core.generation.prompt_file import Prompt, api_messages
from dflash_core.http import AddressRefused, check_url, pinned_async_client
from dflash_core.recipe import GenerationSettings

SHOWN_CHARS = 300


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


class ServerConnection:
    """The way to one server.

    Args:
        url: its base URL.
        generation: the recipe's section.
        key: sent as bearer token; None: no key.

    Raises:
        RecipeError: the URL may not be talked to.
    """

    def __init__(self, url: str, generation: GenerationSettings, key: SecretStr | None) -> None:
        check_url(url, "generation.servers:")
        self.url = url
        self.gives_token_ids = generation.token_ids
        self._generation = generation
        self._key = key
        self._client = pinned_async_client(
            httpx2.Timeout(generation.request_timeout_s, connect=generation.connect_timeout_s, pool=None)
        )

    async def close(self) -> None:
        """Close all connections."""
        await self._client.aclose()

    async def ask(self, prompt: Prompt, request: Request, plan: Plan) -> Answer:
        """Send one request; a usable answer, or Trouble, or ServerRefuses.

        Where it is refused with the wish for token ids and answered without, they are not asked for any more.
        """
        body: dict[str, Json] = {"model": plan.generation.model, "messages": api_messages(prompt.messages)}
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
        headers = {"content-type": "application/json", "user-agent": "dflash"}
        if self._key is not None:
            headers["authorization"] = f"Bearer {self._key.get_secret_value()}"
        content = None if body is None else orjson.dumps(body)
        try:
            async with asyncio.timeout(self._generation.request_timeout_s):
                response = await self._client.request(
                    method, self.url.rstrip("/") + path, content=content, headers=headers
                )
        except AddressRefused as error:
            raise ServerRefuses(str(error)) from None
        except httpx2.ConnectTimeout:
            raise Trouble("failed", f"no connection within {self._generation.connect_timeout_s:g} s") from None
        except (httpx2.TimeoutException, TimeoutError):
            text = f"no answer within {self._generation.request_timeout_s:g} s"
            raise Trouble("overloaded", text, timed_out=True) from None
        except httpx2.HTTPError as error:
            raise Trouble("failed", self.scrub(f"{type(error).__name__}: {error}")) from None
        if response.status_code >= 300:
            raise self._of_status(response)
        try:
            answer = orjson.loads(response.content)
        except ValueError:
            raise Trouble("failed", self.scrub(f"an answer that is not JSON: {response.text[:80]!r}")) from None
        if type(answer) is not dict:
            raise Trouble("failed", "an answer that is not a JSON object")
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
        except Rejected as error:
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
