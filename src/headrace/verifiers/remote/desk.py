"""Jobs in front of an executor: bounded in number, each piece of work done once.

Owns: at most ``num_slots`` executions run and ``max_queued`` wait, whatever arrives; the same job
asked again joins the one under way or gets what is remembered; work that nobody waits for any more
is ended and its slot is free. What is remembered is bounded in number and bytes, and never our own
failure. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, replace

from headrace.percentiles import Window
from headrace.verifiers.remote.wire import digest
from headrace.verifiers.sandbox.execution import Ending, Execution, Executor, Job, Tier

_LOG = logging.getLogger(__name__)

_RECORD_BYTES = 512
"""What a remembered execution takes beside its outputs, roughly."""
_LEAST_RETRY_SECONDS, _MOST_RETRY_SECONDS = 0.05, 10.0


class DeskFullError(Exception):
    """There is no room for another job now."""

    def __init__(self, retry_after_seconds: float) -> None:
        super().__init__(retry_after_seconds)
        self.retry_after_seconds = retry_after_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class DeskLimits:
    """How much a desk takes on."""

    num_slots: int
    """Executions side by side."""
    max_queued: int = 256
    """Jobs that wait for a slot."""
    max_held_bytes: int = 512 << 20
    """Of the requests that are being read, wait or run."""
    max_remembered: int = 4096
    """Finished jobs whose answer is kept, for one that was lost on its way."""
    max_remembered_bytes: int = 128 << 20


@dataclass(slots=True)
class DeskCounts:
    """What has happened since the start."""

    num_running: int = 0
    """Now."""
    num_done: int = 0
    num_infra: int = 0
    num_repeated: int = 0
    num_refused: int = 0
    num_cancelled: int = 0


@dataclass(slots=True)
class _Work:
    """One job under way, and how many callers wait for it."""

    task: asyncio.Task[Execution]
    num_waiting: int = 0


class JobDesk:
    """Used from one event loop. Does not own the executor: whoever made it closes it."""

    def __init__(self, executor: Executor, tier: Tier, limits: DeskLimits) -> None:
        self.tier = tier
        """What the executor offers."""
        self.limits = limits
        self.counts = DeskCounts()
        self.latencies = Window()
        self._executor = executor
        self._slots = asyncio.Semaphore(limits.num_slots)
        self._open: dict[bytes, _Work] = {}
        self._tasks: set[asyncio.Task[Execution]] = set()
        self._remembered: OrderedDict[bytes, Execution] = OrderedDict()
        self._remembered_bytes = 0
        self._held_bytes = 0

    @contextlib.contextmanager
    def holding(self, num_bytes: int) -> Iterator[None]:
        """Count ``num_bytes`` of a request as held. Raises DeskFullError beyond the bound."""
        if self._held_bytes + num_bytes > self.limits.max_held_bytes:
            raise self._full()
        self._held_bytes += num_bytes
        try:
            yield
        finally:
            self._held_bytes -= num_bytes

    async def run(self, job: Job) -> Execution:
        """Return what became of ``job``. Raises DeskFullError where there is no room.

        Waits for a slot and the execution, which its limits bound. Cancelling the last caller that
        waits for a job ends it.
        """
        key = digest(job)
        if (known := self._remembered.get(key)) is not None:
            self._remembered.move_to_end(key)
            self.counts.num_repeated += 1
            return known
        work = self._open.get(key)
        if work is None:
            work = self._admit(key, job)
        else:
            self.counts.num_repeated += 1
        work.num_waiting += 1
        try:
            return await asyncio.shield(work.task)
        finally:
            work.num_waiting -= 1
            if work.num_waiting == 0 and not work.task.done():
                # At once, so that who asks again meets no job that is ending.
                self._open.pop(key)
                self.counts.num_cancelled += 1
                work.task.cancel()

    async def close(self) -> None:
        """End everything under way. Idempotent."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def num_queued(self) -> int:
        """Jobs that wait for a slot now."""
        return len(self._tasks) - self.counts.num_running

    def _admit(self, key: bytes, job: Job) -> _Work:
        if len(self._tasks) >= self.limits.num_slots + self.limits.max_queued:
            raise self._full()
        task = asyncio.create_task(self._do(key, job))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        work = self._open[key] = _Work(task)
        return work

    async def _do(self, key: bytes, job: Job) -> Execution:
        began = time.monotonic()
        async with self._slots:
            self.counts.num_running += 1
            try:
                execution = await self._execute(key, job)
            finally:
                self.counts.num_running -= 1
        self.latencies.add(time.monotonic() - began)
        self.counts.num_done += 1
        if execution.ending is Ending.INFRA:
            self.counts.num_infra += 1
        else:
            self._remember(key, execution)
        del self._open[key]
        return execution

    async def _execute(self, key: bytes, job: Job) -> Execution:
        # Two runs may use one id for different programs, and an executor takes an id for the work.
        unique = replace(job, job_id=f"{job.job_id}#{key.hex()}")
        try:
            return replace(await self._executor.run(unique), job_id=job.job_id)
        # The one boundary to an executor: a fault of it costs one job, not the server.
        except Exception as error:  # noqa: BLE001 - see the line above
            _LOG.exception("the executor failed")
            detail = f"the executor failed: {type(error).__name__}: {error}"
            return Execution(
                job_id=job.job_id, tier=self.tier, ending=Ending.INFRA, detail=detail[:1000]
            )

    def _remember(self, key: bytes, execution: Execution) -> None:
        self._remembered[key] = execution
        self._remembered_bytes += _size(execution)
        while (
            len(self._remembered) > self.limits.max_remembered
            or self._remembered_bytes > self.limits.max_remembered_bytes
        ):
            _, forgotten = self._remembered.popitem(last=False)
            self._remembered_bytes -= _size(forgotten)

    def _full(self) -> DeskFullError:
        """Say when there may be room: what is held leaves at the rate at which it came (Little)."""
        self.counts.num_refused += 1
        num_held = self.limits.num_slots + self.limits.max_queued
        seconds = (self.latencies.mean() or 0.0) / num_held
        return DeskFullError(min(max(seconds, _LEAST_RETRY_SECONDS), _MOST_RETRY_SECONDS))


def _size(execution: Execution) -> int:
    outputs = len(execution.stdout) + len(execution.stderr) + len(execution.returned or b"")
    return _RECORD_BYTES + outputs
