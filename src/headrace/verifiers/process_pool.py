"""A fixed number of killable worker processes that answer one job at a time each.

Owns: a job that blows its deadline costs exactly one process, which is killed with its whole
process group, reaped and replaced, so no slot is ever lost and no zombie stays; a process that
dies, or answers another job than it was given, is replaced and its job tried once more.
The pool has a thread with an event loop of its own, so it may be called from any loop or thread,
and no caller's loop ever waits for a pipe. It does not know what the jobs mean (`worker` does).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar

from headrace.verifiers import frames
from headrace.verifiers.sandbox.watch import descendants
from headrace.verifiers.slots import Slots

START_SECONDS = 120.0
"""Time for a process to import what it needs; not part of a job's deadline."""
_EXIT_STATUS_SECONDS = 1.0
"""Time for a process whose pipe is closed to be reaped, so that its exit status can be told."""
_END_SECONDS = 10.0
"""Time for the pool's own thread to end in `close`; its processes were killed before."""

_T = TypeVar("_T")


class ReplyStatus(StrEnum):
    """How a job ended."""

    OK = "ok"
    ERROR = "error"
    OOM = "oom"
    TIMEOUT = "timeout"
    CRASH = "crash"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What became of a job."""

    status: ReplyStatus
    value: Any = None
    """JSON; what the worker found. Only with OK."""
    detail: str = ""
    traceback: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """What a pool runs."""

    kind: str
    """``math``, ``function`` or ``reward_model``: see `worker`."""
    target: str = ""
    """For ``function`` the import path; for ``reward_model`` its settings as JSON."""
    shown: str = ""
    """The target in messages, where it reads badly as it is."""
    num_processes: int
    timeout_seconds: float
    """For one job, counted from the moment a process that is ready takes it."""
    memory_mib: int | None
    """Address space of one process; None sets no limit."""
    start_seconds: float = START_SECONDS
    """For the imports of a process, before its first job."""

    @property
    def name(self) -> str:
        """What the processes run, as it may stand in a message."""
        return self.shown or (f"path = {self.target!r}" if self.target else self.kind)

    def command(self) -> list[str]:
        """Return the command line of a worker. ``-P``: the current folder shadows no module."""
        settings = {"kind": self.kind, "target": self.target, "memory_mib": self.memory_mib}
        module = "headrace.verifiers.worker"
        return [sys.executable, "-P", "-m", module, json.dumps(settings)]


_READY = Reply(status=ReplyStatus.OK)


class _NotStartedError(Exception):
    """The worker says why it cannot do any job at all."""


class _StartTimeoutError(Exception):
    """The worker is not ready in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """A job as it is sent."""

    sequence: int
    """The worker sends it back: an answer with another one is not of this job."""
    frame: bytes


class _Process:
    """One worker process and its two pipes."""

    def __init__(self, process: asyncio.subprocess.Process, spec: WorkerSpec) -> None:
        self._process = process
        self._spec = spec
        self._ready = False

    @classmethod
    async def start(cls, spec: WorkerSpec) -> _Process:
        process = await asyncio.create_subprocess_exec(
            *spec.command(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Its own process group: a kill takes what it started too, and Ctrl-C does not reach it.
            start_new_session=True,
        )
        return cls(process, spec)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def wait_ready(self) -> None:
        """Wait for the worker's imports. Raises _NotStartedError or _StartTimeoutError."""
        if self._ready:
            return
        spec = self._spec
        try:
            message = await asyncio.wait_for(self._receive(), spec.start_seconds)
        except TimeoutError as error:
            msg = f"{spec.name}: its import did not end within {spec.start_seconds:g} s"
            raise _StartTimeoutError(msg) from error
        except frames.BrokenFrameError as error:
            msg = f"{spec.name}: its process ended during the import ({await self._exit_status()})"
            raise _NotStartedError(msg) from error
        if not message.get("ready"):
            raise _NotStartedError(str(message.get("detail", "the worker did not start")))
        self._ready = True

    async def do(self, job: _Job) -> frames.Message:
        """Send a job and wait for its answer.

        Raises BrokenFrameError when the process ends, or answers something else.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(job.frame)
            await self._process.stdin.drain()
        except ConnectionError as error:
            msg = "the process had ended before its job"
            raise frames.BrokenFrameError(msg) from error
        answer = await self._receive()
        if answer.get("sequence") != job.sequence:
            msg = "the process answered another job than it was given; it was killed"
            raise frames.BrokenFrameError(msg)
        return answer

    async def kill(self) -> int:
        """Kill the process and what it started, reap it and return its exit status."""
        for pid in list(descendants(self.pid)):  # all of them, before any of them is gone
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        status = await self._process.wait()
        # asyncio has no public way to close the pipes of a process; left open, they would wait
        # for a grandchild that holds them.
        self._process._transport.close()  # type: ignore[attr-defined]  # noqa: SLF001 - see above
        await asyncio.sleep(0)
        return status

    async def _exit_status(self) -> str:
        """Return how the process ended, in words, as far as that can be told."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), _EXIT_STATUS_SECONDS)
        status = self._process.returncode
        return "exit status unknown" if status is None else f"exit status {status}"

    async def _receive(self) -> frames.Message:
        assert self._process.stdout is not None
        return await frames.receive(self._process.stdout)


class ProcessPool:
    """Killable processes behind one coroutine; starts nothing before the first call."""

    def __init__(self, spec: WorkerSpec) -> None:
        self._spec = spec
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._closed = False
        self._sequence = itertools.count()
        self.slots = Slots(spec.num_processes)
        """Taken in the pool's own loop, by one job each; may be read from anywhere."""
        # The two below belong to the pool's own loop.
        self._idle: list[_Process] = []
        self._alive: dict[int, _Process] = {}

    @property
    def pids(self) -> tuple[int, ...]:
        """The processes that are alive now: as many as were ever needed at once, at most."""
        return tuple(self._alive)

    async def call(self, job: Mapping[str, object]) -> Reply:
        """Wait for a free process, give it ``job`` and return what became of it.

        Callers queue in order of arrival; what unblocks them is the end of another job, which a
        deadline bounds. A caller that is cancelled takes its process with it.
        """
        return await asyncio.wrap_future(self._submit(self._call(self._numbered(job))))

    def call_blocking(self, job: Mapping[str, object]) -> Reply:
        """Do the same from code that has no event loop."""
        return self._submit(self._call(self._numbered(job))).result()

    def start_problem(self) -> str | None:
        """Start one process, wait until it is ready, and return why it cannot be, or None."""
        reply = self._submit(self._probe()).result()
        return None if reply.status is ReplyStatus.OK else reply.detail

    async def close(self) -> None:
        """Kill and reap every process. Idempotent."""
        await asyncio.to_thread(self.close_blocking)

    def close_blocking(self) -> None:
        """Do the same from code that has no event loop."""
        with self._lock:
            self._closed = True
            loop, thread = self._loop, self._thread
            self._loop = self._thread = None
        if loop is None or thread is None:
            return
        asyncio.run_coroutine_threadsafe(self._kill_all(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join(_END_SECONDS)
        loop.close()

    def _numbered(self, job: Mapping[str, object]) -> _Job:
        sequence = next(self._sequence)
        return _Job(sequence=sequence, frame=frames.encode({"sequence": sequence, "job": job}))

    def _submit(self, work: Coroutine[Any, Any, _T]) -> concurrent.futures.Future[_T]:
        with self._lock:
            if self._closed:
                work.close()
                msg = "the pool is closed"
                raise RuntimeError(msg)
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(
                    target=self._loop.run_forever, name=f"pool-{self._spec.kind}", daemon=True
                )
                self._thread.start()
            return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _call(self, job: _Job) -> Reply:
        async with self.slots.taken():
            reply = await self._attempt(job)
            if reply.status is ReplyStatus.CRASH and not self._is_closed():
                self.slots.note_retry()
                reply = await self._attempt(job)
            return reply

    async def _probe(self) -> Reply:
        async with self.slots.taken():
            return await self._attempt(None)

    async def _attempt(self, job: _Job | None) -> Reply:
        """Do one job on one process; whatever goes wrong, the slot has a process afterwards.

        Without a job it only waits until the process could do one.
        """
        process = self._idle.pop() if self._idle else await self._start()
        if process is None:
            return Reply(status=ReplyStatus.CRASH, detail="the pool was closed")
        reply: Reply | None = None
        try:
            await process.wait_ready()
            reply = _READY
            if job is not None:
                reply = None
                answer = await asyncio.wait_for(process.do(job), self._spec.timeout_seconds)
                reply = _reply(answer)
        except TimeoutError:
            reply = Reply(
                status=ReplyStatus.TIMEOUT,
                detail=f"{self._spec.name}: no answer within {self._spec.timeout_seconds:g} s; "
                "its process was killed",
            )
        except _StartTimeoutError as error:
            # Not tried again: the next process would take as long.
            reply = Reply(status=ReplyStatus.TIMEOUT, detail=str(error))
        except _NotStartedError as error:
            reply = Reply(status=ReplyStatus.CRASH, detail=str(error))
        except frames.BrokenFrameError as error:
            reply = Reply(status=ReplyStatus.CRASH, detail=f"{self._spec.name}: {error}")
        finally:
            # reply is None when the caller was cancelled: the process still works on the job.
            await self._settle(process, reply)
        return reply

    async def _settle(self, process: _Process, reply: Reply | None) -> None:
        if reply is not None and reply.status in {ReplyStatus.OK, ReplyStatus.ERROR}:
            self._idle.append(process)
            return
        self._alive.pop(process.pid, None)
        await process.kill()
        # At once, so that the imports are done before the next job needs them.
        replacement = await self._start()
        if replacement is not None:
            self._idle.append(replacement)

    async def _start(self) -> _Process | None:
        """Start a process; None once the pool is closed."""
        if self._is_closed():
            return None
        process = await _Process.start(self._spec)
        if self._is_closed():
            await process.kill()
            return None
        self._alive[process.pid] = process
        return process

    def _is_closed(self) -> bool:
        with self._lock:
            return self._closed

    async def _kill_all(self) -> None:
        """Kill every process, then let the jobs that were on them come to their end.

        Also with none alive: one may be starting, and its start is a job in progress like any
        other. It sees that the pool is closed and ends.
        """
        await asyncio.gather(*(process.kill() for process in self._alive.values()))
        self._alive.clear()
        await self._drain()
        assert not self._alive, "a process was started by a closed pool"
        self._idle.clear()

    async def _drain(self) -> None:
        """Wait for jobs in progress: their pipes are closed, so each ends within a few turns."""
        current = asyncio.current_task()
        pending = [task for task in asyncio.all_tasks() if task is not current]
        if pending:
            await asyncio.wait(pending)


def _reply(answer: frames.Message) -> Reply:
    return Reply(
        status=ReplyStatus(answer["status"]),
        value=answer.get("value"),
        detail=answer.get("detail", ""),
        traceback=answer.get("traceback", ""),
    )
