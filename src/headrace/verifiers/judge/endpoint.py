"""One OpenAI-compatible endpoint: a question in, text out, within a deadline.

Owns: a question is asked again only where that may help, after as long as the endpoint says and
never beyond the deadline; an answer is read up to a size; no message quotes the key. Knows nothing
of what is asked.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

import httpx2

from headrace.config.judge import EndpointSection
from headrace.verifiers.component import shown

BACKOFF_SECONDS = 0.5
"""Before the first repetition, doubled for each further one and drawn between half and all."""
MAX_BACKOFF_SECONDS = 30.0
CONNECT_SECONDS = 10.0
MAX_BYTES = 4 * 1024 * 1024
"""Of a reply; a longer one is broken off."""
_BUSY = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
"""Statuses that a later try may not meet again."""
_MISUNDERSTOOD = frozenset({400, 415, 422, 501})
"""Statuses of an endpoint that does not know a part of the question."""


class NoAnswerError(Exception):
    """The endpoint gave no answer; says why."""


class LateError(NoAnswerError):
    """Not within the deadline."""


class MisunderstoodError(NoAnswerError):
    """The endpoint does not take the question as it is put."""


class _BusyError(Exception):
    """It may be asked again, in ``seconds`` if it said so."""

    def __init__(self, why: str, seconds: float | None = None) -> None:
        super().__init__(why, seconds)
        self.why, self.seconds = why, seconds


class Endpoint:
    """Makes calls to one endpoint, from the event loop that made the first."""

    def __init__(
        self, config: EndpointSection, api_key: str | None, on_retry: Callable[[], None]
    ) -> None:
        self._config = config
        self._url = f"{config.url}/chat/completions"
        self._on_retry = on_retry
        self._http = httpx2.AsyncClient(
            headers={} if api_key is None else {"Authorization": f"Bearer {api_key}"},
            # The deadline of a question covers all of its calls; `ask` keeps it.
            timeout=httpx2.Timeout(None, connect=CONNECT_SECONDS),
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=None),
            follow_redirects=False,
            # Reading the certificates takes a tenth of a second; without TLS nobody asks for them.
            verify=config.url.startswith("https:"),
            trust_env=False,
        )

    async def ask(self, body: Mapping[str, object]) -> str:
        """Return what the model wrote. Raises NoAnswerError."""
        deadline = asyncio.get_running_loop().time() + self._config.timeout_seconds
        last = ""
        try:
            async with asyncio.timeout_at(deadline):
                for attempt in range(self._config.max_retries + 1):
                    try:
                        return await self._call(body)
                    except _BusyError as busy:
                        last = busy.why
                        if attempt == self._config.max_retries:
                            break
                        await self._wait(busy, attempt, deadline)
        except TimeoutError as error:
            msg = f"{self._url}: no answer within {self._config.timeout_seconds:g} s"
            raise LateError(f"{msg}; the last: {last}" if last else msg) from error
        msg = f"{self._url}: asked {self._config.max_retries + 1} times; the last: {last}"
        raise NoAnswerError(msg)

    async def close(self) -> None:
        """Close every connection. Idempotent."""
        await self._http.aclose()

    async def _wait(self, busy: _BusyError, attempt: int, deadline: float) -> None:
        """Wait before the next try. Raises LateError at once if that lies beyond the deadline."""
        # Not from the seed tree: how long one waits changes no verdict.
        backoff = min(BACKOFF_SECONDS * 2.0**attempt, MAX_BACKOFF_SECONDS)
        seconds = backoff * random.uniform(0.5, 1.0) if busy.seconds is None else busy.seconds  # noqa: S311 - no secret
        if asyncio.get_running_loop().time() + seconds > deadline:
            msg = (
                f"{self._url}: {busy.why}; the next try, in {seconds:.1f} s, is beyond "
                f"timeout_seconds = {self._config.timeout_seconds:g}"
            )
            raise LateError(msg)
        self._on_retry()
        await asyncio.sleep(seconds)

    async def _call(self, body: Mapping[str, object]) -> str:
        try:
            async with self._http.stream("POST", self._url, json=body) as response:
                content = await self._read(response)
        except httpx2.LocalProtocolError:
            # It would quote the header that it could not send, which may be the key.
            msg = f"{self._url}: the request cannot be sent as HTTP; is the API key whole?"
            raise NoAnswerError(msg) from None
        except httpx2.RequestError as error:
            why = f"{type(error).__name__}: {error}"
            raise _BusyError(why) from error
        status = response.status_code
        if status == httpx2.codes.OK:
            return _written(self._url, content)
        why = f"HTTP {status}: {shown(content.decode(errors='replace'), 200)}"
        if status in _BUSY:
            raise _BusyError(why, _retry_after(response.headers.get("Retry-After")))
        msg = f"{self._url}: {why}"
        if status in _MISUNDERSTOOD:
            raise MisunderstoodError(msg)
        if status in {401, 403}:
            msg += "; name the variable that holds its key as api_key_variable"
        raise NoAnswerError(msg)

    async def _read(self, response: httpx2.Response) -> bytes:
        content = bytearray()
        async for chunk in response.aiter_bytes():
            content += chunk
            if len(content) > MAX_BYTES:
                msg = f"{self._url}: the reply is longer than {MAX_BYTES} bytes"
                raise NoAnswerError(msg)
        return bytes(content)


def _written(url: str, content: bytes) -> str:
    """Return the text of the first choice. Raises _BusyError where the reply is no reply."""
    try:
        reply = json.loads(content)
        text = reply["choices"][0]["message"]["content"]
    except (ValueError, RecursionError, LookupError, TypeError) as error:
        why = f"{url}: a reply of another form: {shown(content.decode(errors='replace'), 200)}"
        raise _BusyError(why) from error
    # A refusal or a call of a tool has no content: an answer that says nothing.
    return text if isinstance(text, str) else ""


def _retry_after(value: str | None) -> float | None:
    """Return the seconds that a Retry-After header asks for: a number of them, or a date."""
    if value is None:
        return None
    with suppress(ValueError):
        seconds = float(value)
        return seconds if 0.0 <= seconds < float("inf") else None
    with suppress(ValueError):
        date = parsedate_to_datetime(value)
        moment = date if date.tzinfo else date.replace(tzinfo=UTC)
        return max(0.0, (moment - datetime.now(UTC)).total_seconds())
    return None
