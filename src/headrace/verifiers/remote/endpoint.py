"""One server as its client sees it: whether it can be used, and one question to it.

Owns: an endpoint that fails rests, longer each time, and is asked how it is before it gets a job
again; what it answers is checked before anyone sees it. Chooses nothing: `executor` does.
"""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass
from typing import Final

import httpx2
from pydantic import ValidationError

from headrace import __version__
from headrace.verifiers.remote.wire import (
    HEALTH_PATH,
    RUN_PATH,
    WIRE_VERSION,
    Health,
    Refusal,
    RunAnswer,
    RunRequest,
    execution_problem,
    is_at_least,
    max_answer_bytes,
)
from headrace.verifiers.sandbox.execution import Ending, Execution, Job, Tier

FIRST_REST_SECONDS: Final = 0.25
LONGEST_REST_SECONDS: Final = 30.0
MAX_INFRA_IN_A_ROW: Final = 3
"""Executions that failed for its own reasons, after which it rests: failing is fast, and the one
with fewest open jobs would get them all."""
_GRACE_SECONDS = 5.0
"""For the server's own word that it is late to arrive."""
_MAX_HEALTH_BYTES = 65536
_MAX_REFUSAL_BYTES = 65536
_MAX_QUOTED = 200


class EndpointError(Exception):
    """Why there is no execution."""


class LostError(EndpointError):
    """It cannot be reached, broke off, was silent or answered nonsense: it should rest."""


class UnfitError(LostError):
    """It answers, and cannot serve us: the token, the release, or what it offers is not right."""


class BusyError(EndpointError):
    """It lives and has no room now."""

    def __init__(self, message: str, seconds: float) -> None:
        super().__init__(message, seconds)
        self.seconds = seconds

    def __str__(self) -> str:
        return str(self.args[0])


class LateError(EndpointError):
    """It lives and did not come to the job in time."""


class NotTakenError(EndpointError):
    """It will not run this job, whatever the time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demands:
    """What every endpoint must offer, and how long it may take."""

    minimum_tier: Tier
    health_seconds: float
    """For an answer about health."""


class Endpoint:
    """Used from one event loop."""

    def __init__(self, url: str, http: httpx2.AsyncClient, demands: Demands) -> None:
        self.url = url
        self.num_open = 0
        """Questions it has not answered yet."""
        self.num_slots = 0
        """Executions it makes side by side, as it said when it was last asked; 0 before."""
        self.trouble = "it has not been asked yet"
        """Why it is not used; the empty text while it is."""
        self.is_unfit = False
        """Whether the trouble is one that time will not heal."""
        self.rests_until = 0.0
        """By the monotonic clock; before it is asked for its health again, or while it is busy."""
        self._http = http
        self._demands = demands
        self._num_failures = 0
        self._num_infra = 0
        """In a row."""
        self._spell = 0
        """Counts the times it was found well: the failure of a call of an earlier spell is old."""

    @property
    def is_well(self) -> bool:
        """Whether it may be given a job, when it does not rest."""
        return not self.trouble

    async def examine(self) -> Health:
        """Ask for its health; it is well from now on. Raises LostError, and then it rests."""
        try:
            health = await self._health()
        except LostError as error:
            self._rest(error)
            raise
        self.trouble, self.is_unfit = "", False
        self.num_slots = health.num_slots
        self._spell += 1
        return health

    async def run(self, job: Job, seconds: float) -> Execution:
        """Return what it says became of ``job``, checked. Raises EndpointError."""
        spell = self._spell
        self.num_open += 1
        try:
            execution = await self._run(job, seconds)
        except BusyError as error:
            self.rests_until = max(self.rests_until, time.monotonic() + error.seconds)
            raise
        except LostError as error:
            # Of many calls that one failure cuts off, the first one counts.
            if spell == self._spell and self.is_well:
                self._rest(error)
            raise
        finally:
            self.num_open -= 1
        self._note(execution)
        return execution

    def _note(self, execution: Execution) -> None:
        if execution.ending is not Ending.INFRA:
            self._num_failures = self._num_infra = 0
            return
        self._num_infra += 1
        if self._num_infra >= MAX_INFRA_IN_A_ROW and self.is_well:
            self._num_infra = 0
            msg = f"{self.url}: {MAX_INFRA_IN_A_ROW} executions in a row failed: {execution.detail}"
            self._rest(LostError(msg))

    def _rest(self, error: LostError) -> None:
        self._num_failures += 1
        self.trouble, self.is_unfit = str(error), isinstance(error, UnfitError)
        longest = min(FIRST_REST_SECONDS * 2.0 ** (self._num_failures - 1), LONGEST_REST_SECONDS)
        self.rests_until = time.monotonic() + jittered(longest)

    async def _health(self) -> Health:
        status, body = await self._ask(
            "GET", HEALTH_PATH, None, self._demands.health_seconds, _MAX_HEALTH_BYTES
        )
        if status != httpx2.codes.OK:
            raise self._refused(status, body)
        try:
            health = Health.model_validate_json(body)
        except ValidationError as error:
            raise UnfitError(self._said("its health is none", body)) from error
        if health.wire_version != WIRE_VERSION:
            msg = (
                f"{self.url}: headrace {health.headrace} there speaks version "
                f"{health.wire_version} and headrace {__version__} here version {WIRE_VERSION}; "
                "install one release"
            )
            raise UnfitError(msg)
        if not is_at_least(health.tier, self._demands.minimum_tier):
            msg = (
                f"{self.url}: it isolates by {health.tier}, below the demanded "
                f"{self._demands.minimum_tier}; `headrace doctor` there says what is missing"
            )
            raise UnfitError(msg)
        return health

    async def _run(self, job: Job, seconds: float) -> Execution:
        request = RunRequest(
            minimum_tier=self._demands.minimum_tier, deadline_seconds=seconds, job=job
        )
        body = request.model_dump_json().encode()
        status, answer = await self._ask(
            "POST", RUN_PATH, body, seconds + _GRACE_SECONDS, max_answer_bytes(job)
        )
        if status != httpx2.codes.OK:
            raise self._refused(status, answer)
        try:
            execution = RunAnswer.model_validate_json(answer).execution
        except ValidationError as error:
            raise LostError(self._said("its answer is none", answer)) from error
        problem = execution_problem(execution, job, self._demands.minimum_tier)
        if problem is not None:
            msg = f"{self.url}: {problem}"
            raise UnfitError(msg)
        return execution

    async def _ask(
        self, method: str, path: str, body: bytes | None, seconds: float, most: int
    ) -> tuple[int, bytes]:
        """Return status and body of the answer. Waits at most ``seconds``."""
        try:
            async with asyncio.timeout(seconds):
                return await self._exchange(method, path, body, most)
        except TimeoutError as error:
            msg = f"{self.url}: no answer within {seconds:g} s"
            raise LostError(msg) from error
        except httpx2.LocalProtocolError:
            # It would quote the header that cannot be sent, which may be the token.
            msg = f"{self.url}: the request cannot be sent as HTTP"
            raise UnfitError(msg) from None
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            msg = f"{self.url}: {type(error).__name__}: {error}"
            raise LostError(msg) from error

    async def _exchange(
        self, method: str, path: str, body: bytes | None, most: int
    ) -> tuple[int, bytes]:
        headers = {"Content-Type": "application/json"} if body is not None else {}
        async with self._http.stream(
            method, self.url + path, content=body, headers=headers
        ) as answer:
            limit = most if answer.status_code == httpx2.codes.OK else _MAX_REFUSAL_BYTES
            found = bytearray()
            # Raw: what is compressed could grow beyond every bound, and none was asked for.
            async for part in answer.aiter_raw():
                found += part
                if len(found) > limit:
                    msg = f"{self.url}: its answer is longer than {limit} bytes"
                    raise LostError(msg)
            return answer.status_code, bytes(found)

    def _refused(self, status: int, body: bytes) -> EndpointError:
        try:
            refusal = Refusal.model_validate_json(body)
        except ValidationError:
            return LostError(self._said(f"HTTP {status}", body))
        told = f"{self.url}: {refusal.message[:_MAX_QUOTED]}"
        match refusal.kind:
            case "full":
                return BusyError(told, refusal.retry_after_seconds or FIRST_REST_SECONDS)
            case "late":
                return LateError(told)
            case "unauthorized":
                return UnfitError(f"{told}; name the variable that holds it as token_env")
            case "tier":
                return UnfitError(told)
            case "invalid" | "length_required" | "too_large" | "slow_body":
                return NotTakenError(told)

    def _said(self, what: str, body: bytes) -> str:
        text = body[:_MAX_QUOTED].decode("utf-8", "replace")
        return f"{self.url}: {what}: {text!r}"


def jittered(seconds: float) -> float:
    """Return between half and all of ``seconds``, drawn so that many who wait do not meet.

    Not from the seed tree: how long one waits changes no verdict.
    """
    return seconds * random.uniform(0.5, 1.0)  # noqa: S311 - no secret
