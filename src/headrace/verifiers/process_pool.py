"""A number of killable worker processes that do jobs one after the other.

Owns: a job that blows its deadline costs exactly one process, which is killed with all that it
started, reaped and replaced, so no place is ever lost and no zombie stays; a process that dies, or
answers another job than it was given, is replaced and the job it was at tried once more. Jobs that
take little go to a process several at a time, so that the pipe is paid for once; each has its own
deadline all the same, and those behind one that failed go to another process untouched. Where there
are to be fewer processes, one goes when it has answered what it was given, and not before.
The pool has a thread with an event loop of its own, so it may be called from any loop or thread,
and no caller's loop ever waits for a pipe. It does not know what the jobs mean (`worker` does).

    _serve      waits for one answer after the other, each with a deadline; unblocked by the worker,
                by its end, or by a caller that gives up
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import itertools
import threading
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeAlias

from headrace.verifiers import frames
from headrace.verifiers.slots import Slots
from headrace.verifiers.worker_process import (
    NotStartedError,
    StartTimeoutError,
    WorkerProcess,
    WorkerSpec,
)

MAX_BATCH = 32
"""Jobs that a process is given at once."""
_BATCH_SECONDS = 0.005
"""Of work at once: beyond it the pipe no longer matters, and an idle process would."""
_BATCH_BYTES = 1 << 20
_RECENT = 0.2
"""Weight of the last job in the mean of how long one takes."""
_END_SECONDS = 10.0
"""Time for the pool's own thread to end in `close`; its processes were killed before."""
_MOST_TRIES = 2


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
    cpu_seconds: float = 0.0
    """With TIMEOUT: what its process computed meanwhile. Little means that the machine was busy."""
    exit_status: int | None = None
    """With CRASH: how its process ended, below 0 by a signal; None where it did not."""


_Answer: TypeAlias = asyncio.Future[Reply] | concurrent.futures.Future[Reply]
_Outcome: TypeAlias = Reply | Exception
"""Returned, or raised at the caller."""
_CLOSED = Reply(status=ReplyStatus.CRASH, detail="the pool was closed")


@dataclass(slots=True, eq=False, kw_only=True)
class _Job:
    """A job under way. Belongs to the pool's own loop, but for its answer."""

    sequence: int
    """The worker sends it back: an answer with another one is not of this job."""
    frame: bytes
    answer: _Answer
    loop: asyncio.AbstractEventLoop | None
    """The caller's, in which alone its answer may be set; None for one that blocks."""
    num_tries: int = 0
    failure: Reply | None = None
    """Why its process was given up; told once it is gone."""
    server: asyncio.Task[None] | None = None
    """What waits for its answer now."""


class ProcessPool:
    """Killable processes behind one coroutine; starts nothing before the first call."""

    def __init__(self, spec: WorkerSpec) -> None:
        self._spec = spec
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._closed = False
        self._inbox: list[_Job] = []
        """Jobs on their way into the pool's own loop."""
        self._sequence = itertools.count()
        self.slots = Slots(spec.num_processes)
        """Figures of the places; may be read from anywhere."""
        # Those below belong to the pool's own loop.
        self._num_processes = spec.num_processes
        self._queue: deque[_Job] = deque()
        self._num_serving = 0
        self._resizes: set[asyncio.Task[None]] = set()
        self._servers: set[asyncio.Task[None]] = set()
        self._job_seconds: float | None = None
        """Of one job, as it was lately; None before the first."""
        self._outbox: defaultdict[
            asyncio.AbstractEventLoop | None, list[tuple[_Answer, _Outcome]]
        ] = defaultdict(list)
        """What is known and not told yet, by the callers' loops."""
        self._idle: list[WorkerProcess] = []
        self._alive: dict[int, WorkerProcess] = {}

    @property
    def num_workers(self) -> int:
        """Processes that may be at work side by side."""
        return self._num_processes

    async def resize(self, num_workers: int) -> None:
        """See `Resizable`. Waits for processes to end; unblocked by the ends of their jobs.

        A process too many goes once it has answered what it was given. Processes are still started
        when they are needed. Does nothing once the pool is closed.
        """
        with self._lock:
            if self._closed:
                return
            resizing = asyncio.run_coroutine_threadsafe(
                self._resize(num_workers), self._running_loop()
            )
        await asyncio.wrap_future(resizing)

    @property
    def pids(self) -> tuple[int, ...]:
        """The processes that are alive now: as many as were ever needed at once, at most."""
        return tuple(self._alive)

    async def call(self, job: Mapping[str, object]) -> Reply:
        """Wait for a free process, give it ``job`` and return what became of it.

        Callers queue in order of arrival; what unblocks them is the end of other jobs, which
        deadlines bound. A caller that is cancelled takes the process with it that is at its job.
        """
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Reply] = loop.create_future()
        submitted = self._submit(job, answer, loop)
        try:
            return await answer
        except asyncio.CancelledError:
            self._give_up(submitted)
            raise

    def call_blocking(self, job: Mapping[str, object]) -> Reply:
        """Do the same from code that has no event loop."""
        answer: concurrent.futures.Future[Reply] = concurrent.futures.Future()
        self._submit(job, answer, None)
        return answer.result()

    def start_problem(self) -> str | None:
        """Start one process, wait until it is ready, and return why it cannot be, or None."""
        with self._lock:
            loop = self._running_loop()
        return asyncio.run_coroutine_threadsafe(self._probe(), loop).result()

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
        asyncio.run_coroutine_threadsafe(self._end(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join(_END_SECONDS)
        loop.close()

    def _submit(
        self, job: Mapping[str, object], answer: _Answer, loop: asyncio.AbstractEventLoop | None
    ) -> _Job:
        sequence = next(self._sequence)
        frame = frames.encode({"sequence": sequence, "job": job})
        made = _Job(sequence=sequence, frame=frame, answer=answer, loop=loop)
        with self._lock:
            own = self._running_loop()
            self._inbox.append(made)
            # Those that follow before the loop has come to it are taken with it.
            if len(self._inbox) == 1:
                own.call_soon_threadsafe(self._take_inbox)
        return made

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        """Return the pool's own loop; its lock is held. Raises RuntimeError once it is closed."""
        if self._closed:
            msg = "the pool is closed"
            raise RuntimeError(msg)
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(
                target=self._loop.run_forever, name=f"pool-{self._spec.kind}", daemon=True
            )
            self._thread.start()
        return self._loop

    def _give_up(self, job: _Job) -> None:
        """Note in the pool's own loop that nobody waits for a job any more."""
        with self._lock:
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._drop, job)

    def _take_inbox(self) -> None:
        with self._lock:
            taken, self._inbox = self._inbox, []
        self.slots.note_waiting(len(taken))
        self._queue.extend(taken)
        self._dispatch()

    def _drop(self, job: _Job) -> None:
        if job in self._queue:
            self._queue.remove(job)
            self.slots.note_waiting(-1, num_cancelled=1)
        elif job.server is not None:
            job.server.cancel()

    def _dispatch(self) -> None:
        while self._queue and self._num_serving < self._num_processes:
            batch = self._cut()
            self._num_serving += 1
            server = asyncio.create_task(self._serve(batch))
            self._servers.add(server)
            server.add_done_callback(self._servers.discard)

    def _cut(self) -> deque[_Job]:
        """Take jobs for one process: half a fair share, so that the last ones end together."""
        seconds = self._job_seconds
        fast = 1 if seconds is None else int(_BATCH_SECONDS / max(seconds, 1e-6))
        share = -(-len(self._queue) // (2 * self._num_processes))
        batch, num_bytes = deque([self._queue.popleft()]), 0
        while self._queue and len(batch) < min(share, fast, MAX_BATCH):
            num_bytes += len(self._queue[0].frame)
            # One that is tried again does so alone.
            if num_bytes > _BATCH_BYTES or batch[0].num_tries or self._queue[0].num_tries:
                break
            batch.append(self._queue.popleft())
        return batch

    async def _serve(self, jobs: deque[_Job]) -> None:
        """Do jobs on one process; whatever goes wrong, the place has a process afterwards."""
        batch = tuple(jobs)
        self.slots.note_begun(len(batch))
        try:
            process = self._idle.pop() if self._idle else await self._start()
            if process is not None and not await self._answers(process, jobs):
                await self._replace(process)
                self._settle_first(jobs)
            if self._is_closed():
                self._settle_all(jobs, _CLOSED)
        # The one boundary of this loop: what nobody foresaw is raised at every caller.
        except Exception as error:  # noqa: BLE001 - see the line above
            self._settle_all(jobs, error)
        finally:
            live = [job for job in jobs if not job.answer.cancelled()]
            self._queue.extendleft(reversed(live))
            given_up = sum(job.answer.cancelled() for job in batch)
            num_ended = len(batch) - len(live) - given_up
            self.slots.note_ended(num_ended, num_back=len(live), num_cancelled=given_up)
            self._num_serving -= 1
            self._deliver()
            self._dispatch()

    async def _answers(self, process: WorkerProcess, jobs: deque[_Job]) -> bool:
        """Take the answers of ``process`` to ``jobs``, off their front; whether it is still good.

        Where it is not, the first job that is left holds why, for its caller to hear of once the
        process is gone; those behind it were not begun.
        """
        try:
            await process.wait_ready()
        except StartTimeoutError as error:
            # Not tried again: the next process would take as long.
            jobs[0].failure = Reply(status=ReplyStatus.TIMEOUT, detail=str(error))
            return False
        except NotStartedError as error:
            jobs[0].failure = Reply(status=ReplyStatus.CRASH, detail=str(error))
            return False
        process.send(b"".join(job.frame for job in jobs))
        while jobs:
            reply = await self._answer(process, jobs[0])
            if reply is None or reply.status not in {ReplyStatus.OK, ReplyStatus.ERROR}:
                jobs[0].failure = reply
                return False
            self._settle(jobs.popleft(), reply)
        self._idle.append(process)
        return True

    async def _answer(self, process: WorkerProcess, job: _Job) -> Reply | None:
        """Wait for one answer, within the deadline; None for a caller that gave up."""
        name = self._spec.name
        if job.answer.cancelled():
            return None
        job.server = asyncio.current_task()
        try:
            async with asyncio.timeout(self._spec.timeout_seconds):
                answer = await process.answer(job.sequence)
        except TimeoutError:
            detail = f"{name}: no answer within {self._spec.timeout_seconds:g} s; its process was"
            used = process.cpu_seconds()
            return Reply(status=ReplyStatus.TIMEOUT, detail=f"{detail} killed", cpu_seconds=used)
        except frames.BrokenFrameError as error:
            job.server = None
            status = await process.exit_status()
            return Reply(status=ReplyStatus.CRASH, detail=f"{name}: {error}", exit_status=status)
        except asyncio.CancelledError:
            # By `_drop` alone: nobody else cancels what serves.
            assert job.server is not None
            job.server.uncancel()
            return None
        finally:
            job.server = None
        # By the worker's own clock: here a busy machine would count, too.
        seconds = float(answer.get("seconds", 0.0))
        mean = seconds if self._job_seconds is None else self._job_seconds
        self._job_seconds = mean + _RECENT * (seconds - mean)
        return _reply(answer)

    def _settle_first(self, jobs: deque[_Job]) -> None:
        """Tell the caller of the job whose process is gone, or leave it to be tried once more."""
        first = jobs[0]
        first.num_tries += 1
        failure, first.failure = first.failure, None
        is_last = first.num_tries == _MOST_TRIES
        if failure is None:
            jobs.popleft()
        elif failure.status is not ReplyStatus.CRASH or is_last or self._is_closed():
            self._settle(jobs.popleft(), failure)
        else:
            self.slots.note_retry()

    def _settle(self, job: _Job, outcome: _Outcome) -> None:
        self._outbox[job.loop].append((job.answer, outcome))

    def _settle_all(self, jobs: deque[_Job], outcome: _Outcome) -> None:
        while jobs:
            self._settle(jobs.popleft(), outcome)

    def _deliver(self) -> None:
        """Give callers what has come for them: all of one loop at once, for waking it costs."""
        while self._outbox:
            loop, outcomes = self._outbox.popitem()
            if loop is None:
                _set_answers(outcomes)
            elif not loop.is_closed():
                # Closed meanwhile, it has nobody who waits.
                with contextlib.suppress(RuntimeError):
                    loop.call_soon_threadsafe(_set_answers, outcomes)

    async def _resize(self, num_workers: int) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._resizes.add(task)
        task.add_done_callback(self._resizes.discard)
        self._num_processes = num_workers
        self.slots.note_count(num_workers)
        self._dispatch()
        # One that serves may still be starting its process.
        while max(len(self._alive), self._num_serving) > self._num_processes:
            surplus = len(self._alive) - self._num_processes
            leaving = [self._idle.pop() for _ in range(min(surplus, len(self._idle)))]
            for process in leaving:
                del self._alive[process.pid]
            if leaving:
                await asyncio.gather(*(process.kill() for process in leaving))
            elif self._servers:
                await asyncio.wait(set(self._servers), return_when=asyncio.FIRST_COMPLETED)
            else:
                return  # one that is merely tried out

    async def _replace(self, process: WorkerProcess) -> None:
        self._alive.pop(process.pid, None)
        await process.kill()
        if len(self._alive) >= self._num_processes:
            return
        # At once, so that the imports are done before the next job needs them.
        replacement = await self._start()
        if replacement is not None:
            self._idle.append(replacement)

    async def _start(self) -> WorkerProcess | None:
        """Start a process; None once the pool is closed."""
        if self._is_closed():
            return None
        process = await WorkerProcess.start(self._spec)
        if self._is_closed():
            await process.kill()
            return None
        self._alive[process.pid] = process
        return process

    async def _probe(self) -> str | None:
        process = await self._start()
        if process is None:
            return _CLOSED.detail
        try:
            await process.wait_ready()
        except (NotStartedError, StartTimeoutError) as error:
            await self._replace(process)
            return str(error)
        self._idle.append(process)
        return None

    def _is_closed(self) -> bool:
        with self._lock:
            return self._closed

    async def _end(self) -> None:
        """Kill every process, then let the jobs that were on them come to their end.

        Also with none alive: one may be starting, and its start is a job in progress like any
        other. It sees that the pool is closed and ends.
        """
        self._take_inbox()
        self._settle_all(self._queue, _CLOSED)
        self._deliver()
        await asyncio.gather(*(process.kill() for process in self._alive.values()))
        self._alive.clear()
        # Their pipes are closed, so each ends within a few turns; who waits for fewer of them, too.
        while under_way := self._servers | self._resizes:
            await asyncio.wait(set(under_way))
        assert not self._alive, "a process was started by a closed pool"
        self._idle.clear()


def _set_answers(outcomes: Iterable[tuple[_Answer, _Outcome]]) -> None:
    for answer, outcome in outcomes:
        if answer.done():
            continue
        if isinstance(outcome, Reply):
            answer.set_result(outcome)
        else:
            answer.set_exception(outcome)


def _reply(answer: frames.Message) -> Reply:
    return Reply(
        status=ReplyStatus(answer["status"]),
        value=answer.get("value"),
        detail=answer.get("detail", ""),
        traceback=answer.get("traceback", ""),
    )
