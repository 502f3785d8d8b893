"""Executions by servers elsewhere, behind the same interface as those here.

Owns: every job has an answer within its own wall clock limit and ``patience_seconds``, whatever the
servers do; where none of them gives one that holds, it is INFRA with the causes. A job goes to the
endpoint with the fewest open ones that is well; one that fails there goes to another.

    run         waits for an endpoint, which `_examine` finds well or which has rested enough; then
                for its answer, which has a deadline
    _examine    one at a time for each endpoint that is not well and has rested; has a deadline
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import httpx2

from headrace.config import RemoteConfig
from headrace.config.sglang_rules import is_api_key
from headrace.errors import ConfigError
from headrace.percentiles import Window
from headrace.verifiers.remote.endpoint import (
    BusyError,
    Demands,
    Endpoint,
    EndpointError,
    LostError,
    jittered,
)
from headrace.verifiers.sandbox.execution import Ending, Execution, Job, Tier
from headrace.verifiers.slots import Slots, slot_metrics

_KEEP_IDLE_SECONDS = 30.0
"""Shorter than a server keeps an idle connection, so that none is used as it is being closed."""
_FIRST_WAIT_SECONDS = 0.1
_LONGEST_WAIT_SECONDS = 5.0
_ROLE = "verifier/remote"
_MAX_DETAIL = 1000
"""Characters of the causes that an INFRA tells."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointReport:
    """What is known of an endpoint."""

    url: str
    trouble: str
    """Empty where it can be used."""
    is_unfit: bool
    """Whether it answers and cannot serve all the same."""


class RemoteExecutor:
    """An `Executor`. Used from one event loop; connects to nothing before the first job."""

    def __init__(self, config: RemoteConfig, token: str | None) -> None:
        self._config = config
        headers = {"Accept-Encoding": "identity"}
        if token is not None:
            headers["Authorization"] = f"Bearer {token}"
        self._http = httpx2.AsyncClient(
            headers=headers,
            # `Endpoint` keeps the deadlines of whole calls; only connecting has one here.
            timeout=httpx2.Timeout(None, connect=config.health_seconds),
            limits=httpx2.Limits(
                max_connections=None,
                max_keepalive_connections=None,
                keepalive_expiry=_KEEP_IDLE_SECONDS,
            ),
            trust_env=False,
        )
        demands = Demands(
            minimum_tier=Tier(config.minimum_tier), health_seconds=config.health_seconds
        )
        self._endpoints = [Endpoint(url, self._http, demands) for url in config.endpoints]
        self._room = Slots(config.max_open_jobs)
        self._seconds = Window()
        self._counts = dict.fromkeys(Ending, 0)
        self._open: set[asyncio.Task[Execution]] = set()
        self._examinations: dict[Endpoint, asyncio.Task[None]] = {}
        self._turn = 0
        self._closed = False

    async def run(self, job: Job) -> Execution:
        """Return what became of ``job``; INFRA where no endpoint gave an answer that holds.

        Waits while ``max_open_jobs`` are open, each of which has a deadline of its own. Cancelling
        the call ends the job where it runs.
        """
        async with self._room.taken():
            if self._is_closed():
                return self._infra(job, ["the executor is closed"])
            work = asyncio.create_task(self._bounded(job))
            self._open.add(work)
            began = time.monotonic()
            try:
                return self._counted(await work, time.monotonic() - began)
            except asyncio.CancelledError:
                if self._is_closed() and work.cancelled() and not _is_being_cancelled():
                    return self._infra(job, ["the executor was closed"])
                raise
            finally:
                self._open.discard(work)

    async def examine(self) -> Sequence[EndpointReport]:
        """Ask every endpoint for its health, side by side."""
        await asyncio.gather(*(_examined(endpoint) for endpoint in self._endpoints))
        return [
            EndpointReport(url=one.url, trouble=one.trouble, is_unfit=one.is_unfit)
            for one in self._endpoints
        ]

    def statistics(self) -> dict[str, float]:
        """Return how jobs went, by the names of metrics: see docs/SERVE.md.

        Of places since the last call, counts since the start, latencies of the last jobs.
        """
        figures = self._room.read()
        found = slot_metrics(_ROLE, [figures])
        num_places = sum(one.num_slots for one in self._endpoints if one.is_well)
        found[f"{_ROLE}/num_endpoints_well"] = float(sum(one.is_well for one in self._endpoints))
        found[f"{_ROLE}/servers/num_slots"] = float(num_places)
        if num_places and figures.elapsed_seconds > 0.0:
            # Above 1 where jobs wait in the servers' queues.
            room = num_places * figures.elapsed_seconds
            found[f"{_ROLE}/servers/load"] = figures.busy_seconds / room
        for ending, count in self._counts.items():
            found[f"{_ROLE}/num_{ending.value}"] = float(count)
        if (times := self._seconds.percentiles(50, 99)) is not None:
            found[f"{_ROLE}/run_seconds/p50"], found[f"{_ROLE}/run_seconds/p99"] = times
        return found

    async def close(self) -> None:
        """End every connection; jobs that are open become INFRA. Idempotent."""
        self._closed = True
        tasks: list[asyncio.Task[Any]] = [*self._examinations.values(), *self._open]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._http.aclose()

    def _counted(self, execution: Execution, seconds: float) -> Execution:
        self._counts[execution.ending] += 1
        self._seconds.add(seconds)
        return execution

    async def _bounded(self, job: Job) -> Execution:
        causes: list[str] = []
        seconds = job.limits.wall_seconds + self._config.patience_seconds
        try:
            async with asyncio.timeout(seconds):
                return await self._tried(job, causes)
        except TimeoutError:
            return self._infra(job, [f"no answer within {seconds:g} s", *causes])

    async def _tried(self, job: Job, causes: list[str]) -> Execution:
        """Try endpoints until one answers; ``causes`` gets what went wrong each time."""
        avoided: Endpoint | None = None
        while len(causes) < self._config.max_tries:
            endpoint = await self._chosen(avoided)
            seconds = job.limits.wall_seconds + self._config.queue_seconds
            try:
                execution = await endpoint.run(job, seconds)
            except BusyError:
                # No try: it has not begun. What ends this is room somewhere, or the deadline.
                continue
            except EndpointError as error:
                causes.append(str(error))
            else:
                if execution.ending is not Ending.INFRA:
                    return execution
                causes.append(f"{endpoint.url}: {execution.detail or 'INFRA'}")
            avoided = endpoint
            if len(causes) < self._config.max_tries:
                self._room.note_retry()
            await asyncio.sleep(_wait(len(causes)))
        return self._infra(job, causes)

    async def _chosen(self, avoided: Endpoint | None) -> Endpoint:
        """Wait for an endpoint that is well and does not rest; the one with fewest open jobs.

        Unblocked by the end of an examination, or by the end of the shortest rest.
        """
        while True:
            now = time.monotonic()
            self._examine_rested(now)
            found = [one for one in self._endpoints if one.is_well and one.rests_until <= now]
            others = [one for one in found if one is not avoided] or found
            if others:
                self._turn += 1
                start = self._turn % len(others)
                # In turn among those with equally many.
                return min(others[start:] + others[:start], key=lambda one: one.num_open)
            rests = [one.rests_until - now for one in self._endpoints if one.rests_until > now]
            await self._examined_or(jittered(2.0 * min(rests, default=_LONGEST_WAIT_SECONDS)))

    def _examine_rested(self, now: float) -> None:
        for endpoint in self._endpoints:
            if endpoint.is_well or endpoint.rests_until > now or endpoint in self._examinations:
                continue
            task = asyncio.create_task(_examined(endpoint))
            self._examinations[endpoint] = task
            task.add_done_callback(partial(self._forget, endpoint))

    def _forget(self, endpoint: Endpoint, _task: asyncio.Task[None]) -> None:
        del self._examinations[endpoint]

    async def _examined_or(self, seconds: float) -> None:
        """Wait until an examination ends, or for ``seconds``."""
        if not self._examinations:
            await asyncio.sleep(seconds)
            return
        await asyncio.wait(
            self._examinations.values(), timeout=seconds, return_when=asyncio.FIRST_COMPLETED
        )

    def _is_closed(self) -> bool:
        return self._closed

    def _infra(self, job: Job, causes: Sequence[str]) -> Execution:
        troubles = [one.trouble for one in self._endpoints if one.trouble]
        told = "; ".join(dict.fromkeys([*causes, *troubles]))
        return Execution(
            job_id=job.job_id,
            tier=Tier(self._config.minimum_tier),
            ending=Ending.INFRA,
            detail=told[:_MAX_DETAIL],
        )


def remote_token(config: RemoteConfig, environ: Mapping[str, str]) -> str | None:
    """Return the token that ``config`` names. Raises ConfigError where it is not there."""
    if config.token_env is None:
        return None
    token = environ.get(config.token_env, "")
    if not is_api_key(token):
        msg = (
            f'verifier.remote.token_env = "{config.token_env}": the environment holds no token '
            "under that name, or one with a character that no HTTP header takes; export it"
        )
        raise ConfigError(msg)
    return token


async def _examined(endpoint: Endpoint) -> None:
    """Find out whether ``endpoint`` is well; the answer is its own."""
    with contextlib.suppress(LostError):
        await endpoint.examine()


def _is_being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _wait(num_failures: int) -> float:
    """Return seconds before the next try: longer each time, and drawn."""
    return jittered(min(_FIRST_WAIT_SECONDS * 2.0 ** (num_failures - 1), _LONGEST_WAIT_SECONDS))
