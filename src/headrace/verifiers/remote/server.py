"""An executor over HTTP: who may ask, how much, for how long. Decides nothing about executions.

Owns: nothing is read from anyone without the token; a request has a declared length below the bound
and a deadline for arriving; an asker that goes away takes its job with it.
"""

from __future__ import annotations

import asyncio
import hmac
import math
import platform
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import NoReturn, TypeAlias

from fastapi import FastAPI, Request, Response
from pydantic import ValidationError

from headrace import __version__
from headrace.verifiers.remote.desk import DeskFullError, JobDesk
from headrace.verifiers.remote.wire import (
    ALIVE_PATH,
    HEALTH_PATH,
    METRICS_PATH,
    RUN_PATH,
    STATUSES,
    WIRE_VERSION,
    ErrorKind,
    Health,
    Refusal,
    RunAnswer,
    RunRequest,
    is_at_least,
    job_problem,
)

MAX_BODY_BYTES = 32 << 20
"""Of one request: a program, its input and its files, in base64."""
BODY_SECONDS = 30.0
"""For a request to arrive."""
_MAX_SHOWN = 2000
"""Characters of what is wrong with a request that a refusal tells."""

Receive: TypeAlias = Callable[[], Awaitable[object]]


class RefusedError(Exception):
    """The request has no answer but this refusal."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal)
        self.refusal = refusal


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """Who may ask, and how much."""

    token: str | None
    """None lets everyone in; only a loopback address is ever bound without one."""
    max_body_bytes: int = MAX_BODY_BYTES
    body_seconds: float = BODY_SECONDS

    def check(self, request: Request) -> None:
        """Raises RefusedError without the token."""
        if self.token is None:
            return
        given = request.headers.get("authorization", "")
        # In constant time: how much of it fits must not show.
        if not hmac.compare_digest(given.encode(), f"Bearer {self.token}".encode()):
            _refuse("unauthorized", "give the server's token as Authorization: Bearer TOKEN")

    def length(self, request: Request) -> int:
        """Return the declared length of the body. Raises RefusedError without one or beyond."""
        declared = request.headers.get("content-length", "")
        if not (declared.isascii() and declared.isdigit()):
            _refuse("length_required", "a request declares its Content-Length")
        if int(declared) > self.max_body_bytes:
            msg = f"{declared} bytes; at most {self.max_body_bytes} are read"
            _refuse("too_large", msg)
        return int(declared)

    async def body(self, request: Request) -> bytes:
        """Read the body. Waits for its sender, at most ``body_seconds``."""
        declared, found = self.length(request), bytearray()
        try:
            async with asyncio.timeout(self.body_seconds):
                async for part in request.stream():
                    found += part
                    if len(found) > declared:
                        _refuse("too_large", "more bytes came than were declared")
        except TimeoutError:
            msg = f"the request did not arrive within {self.body_seconds:g} s"
            _refuse("slow_body", msg)
        return bytes(found)


def build_app(desk: JobDesk, gate: Gate) -> FastAPI:
    """Return the application that serves ``desk``."""
    # Without pages about itself: they would tell the interface to whoever has no token.
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    began = time.monotonic()

    @app.exception_handler(RefusedError)
    async def refuse(_request: Request, error: RefusedError) -> Response:
        return _refusal_response(error.refusal)

    @app.get(ALIVE_PATH)
    async def alive() -> Response:
        return Response("ok\n", media_type="text/plain")

    @app.get(HEALTH_PATH)
    async def health(request: Request) -> Response:
        gate.check(request)
        return _json(health_of(desk, time.monotonic() - began))

    @app.get(METRICS_PATH)
    async def metrics(request: Request) -> Response:
        gate.check(request)
        found = health_of(desk, time.monotonic() - began)
        return Response(exposition(found), media_type="text/plain; version=0.0.4")

    @app.post(RUN_PATH)
    async def run(request: Request) -> Response:
        gate.check(request)
        try:
            with desk.holding(gate.length(request)):
                asked = _parsed(await gate.body(request), desk)
                return await _answer(desk, asked, request.receive)
        except DeskFullError as full:
            seconds = full.retry_after_seconds
            _refuse("full", "the queue is full", retry_after_seconds=seconds)

    return app


def health_of(desk: JobDesk, uptime_seconds: float) -> Health:
    """Return what a server says of itself."""
    counts = desk.counts
    middle, late = desk.latencies.percentiles(50, 99) or (None, None)
    return Health(
        wire_version=WIRE_VERSION,
        headrace=__version__,
        python=platform.python_version(),
        tier=desk.tier,
        num_slots=desk.limits.num_slots,
        max_queued=desk.limits.max_queued,
        num_queued=desk.num_queued,
        num_running=counts.num_running,
        num_done=counts.num_done,
        num_infra=counts.num_infra,
        num_repeated=counts.num_repeated,
        num_refused=counts.num_refused,
        num_cancelled=counts.num_cancelled,
        uptime_seconds=uptime_seconds,
        latency_p50_seconds=middle,
        latency_p99_seconds=late,
    )


def exposition(health: Health) -> str:
    """Return the numbers of ``health`` in Prometheus's text format."""
    numbers = {
        name: value
        for name, value in health.model_dump().items()
        if isinstance(value, int | float) and name != "wire_version"
    }
    lines = [f"headrace_verifiers_{name} {value}" for name, value in numbers.items()]
    labels = f'headrace="{health.headrace}",python="{health.python}",tier="{health.tier}"'
    return "\n".join([f"headrace_verifiers_info{{{labels}}} 1", *lines, ""])


def _parsed(body: bytes, desk: JobDesk) -> RunRequest:
    try:
        asked = RunRequest.model_validate_json(body)
    except ValidationError as error:
        faults = error.errors(include_url=False, include_input=False, include_context=False)
        told = "; ".join(f"{'.'.join(map(str, f['loc']))}: {f['msg']}" for f in faults)
        _refuse("invalid", told[:_MAX_SHOWN])
    if (problem := job_problem(asked.job)) is not None:
        _refuse("invalid", problem)
    if not is_at_least(desk.tier, asked.minimum_tier):
        _refuse("tier", f"{asked.minimum_tier} is demanded and {desk.tier} is offered")
    return asked


async def _answer(desk: JobDesk, asked: RunRequest, receive: Receive) -> Response:
    """Wait for the execution, the asker's deadline, or its going away, whichever comes first."""
    work = asyncio.ensure_future(desk.run(asked.job))
    # The body has been read, so the only message that can still come is the end of the connection.
    gone = asyncio.ensure_future(receive())
    try:
        waited = {work, gone}
        await asyncio.wait(
            waited, timeout=asked.deadline_seconds, return_when=asyncio.FIRST_COMPLETED
        )
        if work.done():
            return _json(RunAnswer(execution=work.result()))
        msg = f"no answer within the {asked.deadline_seconds:g} s that were asked for"
        _refuse("late", msg)
    finally:
        for task in (work, gone):
            task.cancel()
        await asyncio.gather(work, gone, return_exceptions=True)


def _json(message: Health | RunAnswer) -> Response:
    return Response(message.model_dump_json(), media_type="application/json")


def _refuse(kind: ErrorKind, message: str, retry_after_seconds: float | None = None) -> NoReturn:
    raise RefusedError(Refusal(kind=kind, message=message, retry_after_seconds=retry_after_seconds))


def _refusal_response(refusal: Refusal) -> Response:
    headers = {}
    if refusal.retry_after_seconds is not None:
        # Whole seconds in HTTP; our client reads the exact ones.
        headers["Retry-After"] = str(math.ceil(refusal.retry_after_seconds))
    if refusal.kind == "unauthorized":
        headers["WWW-Authenticate"] = "Bearer"
    return Response(
        refusal.model_dump_json(),
        status_code=STATUSES[refusal.kind],
        headers=headers,
        media_type="application/json",
    )
