"""One SGLang server over HTTP: every call has a deadline, every failure names the server.

Tells three kinds of failure apart, because they call for different things: the server cannot be
reached or broke off (another may be asked), it is busy (the same may be asked later), it refused or
answered nonsense (nobody should be asked again). Knows nothing of what the calls mean.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

import httpx2

from headrace.errors import GeneratorFailure

T = TypeVar("T")

MAX_QUOTED = 300
"""Characters of a server's answer that an error quotes."""
BACKOFF_SECONDS = 0.5
"""Before the first repetition, doubled for each further one and drawn between half and all."""
BUSY = frozenset({429, 500, 502, 503, 504})
"""Statuses that a later try may not meet again."""


class ServerLost(GeneratorFailure):
    """The connection to a server could not be made or broke, or the server did not answer."""


class ServerSilent(ServerLost):
    """The server did not answer within the deadline; asking again would wait as long again."""


class ServerBusy(GeneratorFailure):
    """The server lives and could not serve this request now."""


class ServerRefused(GeneratorFailure):
    """The server understood and said no, or its answer breaks the interface."""


class Server:
    """The HTTP side of one server."""

    def __init__(self, url: str, http: httpx2.AsyncClient) -> None:
        self.url = url.rstrip("/")
        self._http = http

    async def get(self, path: str, seconds: float) -> dict[str, Any]:
        """Return the JSON object at ``path``."""
        return self._parsed(path, await self._send("GET", path, None, seconds))

    async def post(
        self, path: str, body: Mapping[str, object], seconds: float | None
    ) -> dict[str, Any]:
        """Send ``body`` and return the JSON object that answers it."""
        return self._parsed(path, await self._send("POST", path, body, seconds))

    async def tell(self, path: str, body: Mapping[str, object], seconds: float) -> None:
        """Send ``body`` to an endpoint that answers with no JSON."""
        await self._send("POST", path, body, seconds)

    async def see(self, path: str, seconds: float) -> None:
        """Ask an endpoint that answers with its status alone."""
        await self._send("GET", path, None, seconds)

    async def _send(
        self, method: str, path: str, body: Mapping[str, object] | None, seconds: float | None
    ) -> httpx2.Response:
        try:
            async with asyncio.timeout(seconds):
                response = await self._http.request(method, self.url + path, json=body)
        except TimeoutError as error:
            msg = f"{self.url}{path}: no answer within {seconds:g} s"
            raise ServerSilent(msg) from error
        except httpx2.InvalidURL as error:
            msg = f"{self.url}{path} is no address: {error}"
            raise ServerRefused(msg) from error
        except httpx2.LocalProtocolError:
            # It would quote the header that it could not send, which may be the key.
            msg = f"{self.url}{path}: the request cannot be sent as HTTP; is the API key whole?"
            raise ServerRefused(msg) from None
        except httpx2.RequestError as error:
            msg = f"{self.url}{path}: {type(error).__name__}: {error}"
            raise ServerLost(msg) from error
        self._check(path, response)
        return response

    def _check(self, path: str, response: httpx2.Response) -> None:
        status = response.status_code
        if status == httpx2.codes.OK:
            return
        where = f"{self.url}{path}: HTTP {status}: {_said(response)}"
        if status in {401, 403}:
            where += "; name the variable that holds its key as generator.sglang.api_key_variable"
        raise (ServerBusy if status in BUSY else ServerRefused)(where)

    def _parsed(self, path: str, response: httpx2.Response) -> dict[str, Any]:
        try:
            content = json.loads(response.content)
        except ValueError as error:
            msg = f"{self.url}{path}: the answer is no JSON: {_quote(response.text)}"
            raise ServerRefused(msg) from error
        if not isinstance(content, dict):
            msg = f"{self.url}{path}: the answer is no object: {_quote(response.text)}"
            raise ServerRefused(msg)
        return content


async def repeated(call: Callable[[], Awaitable[T]], max_retries: int) -> T:
    """Await ``call()``, which is safe to repeat, again after it was lost or found nobody free."""
    for attempt in range(max_retries):
        try:
            return await call()
        except ServerSilent:
            raise
        except (ServerLost, ServerBusy):
            await asyncio.sleep(delay(attempt))
    return await call()


def delay(attempt: int) -> float:
    """Return seconds before try ``attempt`` + 1: exponential, and drawn so that many do not meet.

    Not from the seed tree: how long one waits changes no token.
    """
    return BACKOFF_SECONDS * 2.0**attempt * random.uniform(0.5, 1.0)  # noqa: S311 - no secret


def http_client(api_key: str | None, connect_seconds: float) -> httpx2.AsyncClient:
    """Return the connections of one generator: as many as rollouts, none through a proxy."""
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    return httpx2.AsyncClient(
        headers=headers,
        # Deadlines differ by call and are kept by `Server`; only connecting is the same for all.
        timeout=httpx2.Timeout(None, connect=connect_seconds),
        limits=httpx2.Limits(max_connections=None, max_keepalive_connections=None),
        trust_env=False,
    )


def _said(response: httpx2.Response) -> str:
    """Return the message of a refusal: ``{"error": {"message"}}``, ``{"message"}`` or its text."""
    try:
        content = json.loads(response.content)
    except ValueError:
        return _quote(response.text)
    error = content.get("error", content) if isinstance(content, dict) else content
    message = error.get("message", error) if isinstance(error, dict) else error
    return _quote(str(message))


def _quote(text: str) -> str:
    return text if len(text) <= MAX_QUOTED else text[:MAX_QUOTED] + " ..."
