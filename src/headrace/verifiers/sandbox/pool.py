"""The executor: one cell to a slot, each slot a thread, all behind one queue.

Owns: a job costs at most its own cell; a slot always gets a new one; a job that is asked for twice
runs once; a job that nobody waits for any more is ended and its slot is free. A failure of ours is
tried again in a new cell, then it is INFRA. It may be called from any event loop: none of them ever
waits for a pipe. It does not know what a right answer is.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from headrace.percentiles import Window
from headrace.verifiers.sandbox.cell import Cell, CellError
from headrace.verifiers.sandbox.execution import Ending, Execution, Job, Tier
from headrace.verifiers.sandbox.launch import CellSpec
from headrace.verifiers.sandbox.recent import Recent
from headrace.verifiers.sandbox.work import (
    Language,
    command_work,
    compile_work,
    problem_of,
    python_work,
)

_ATTEMPTS = 3
"""For one job, each in a cell of its own, before its failure is reported as ours."""
_START_ATTEMPTS = 2
_BACK_OFF_SECONDS = 0.2
_MAX_COMPILED_BYTES = 128 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSpec:
    """What a pool runs."""

    cell: CellSpec
    num_cells: int
    languages: Mapping[str, Language] = field(default_factory=dict)
    max_queued: int = 1024
    """Jobs that are accepted before a caller waits for room."""


@dataclass(slots=True, kw_only=True)
class _Entry:
    """One accepted job and who waits for it."""

    job: Job
    accepted: float
    waiters: list[Future[Execution]] = field(default_factory=list)
    slot: _Slot | None = None
    """Where it runs now."""
    cancelled: bool = False


class _Slot:
    """A thread's cell, and what wakes the thread while its cell runs a job."""

    def __init__(self) -> None:
        self.wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.cell: Cell | None = None

    def interrupt(self) -> None:
        """End the job that runs."""
        os.eventfd_write(self.wake, 1)

    def calm(self) -> None:
        """Forget an interruption that came too late."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.wake)

    def close(self) -> None:
        """End the cell."""
        if self.cell is not None:
            self.cell.close()
            self.cell = None


class SandboxPool:
    """Runs jobs in isolation; starts nothing before the first."""

    def __init__(self, spec: PoolSpec) -> None:
        self._spec = spec
        self._lock = threading.Lock()
        self._has_work = threading.Condition(self._lock)
        # All below are read and written under the lock.
        self._queue: deque[_Entry] = deque()
        self._entries: dict[str, _Entry] = {}
        self._waiting_for_room: deque[Future[None]] = deque()
        self._recent = Recent()
        self._compiled: OrderedDict[tuple[str, str], bytes] = OrderedDict()
        self._num_workers = spec.num_cells
        self._threads: list[threading.Thread] = []
        self._leaving: set[threading.Thread] = set()
        """Those that take no job any more, and end their cell."""
        self._has_left = threading.Condition(self._lock)
        self._slots: list[_Slot] = []
        self._closed = False
        self._run_seconds = Window()
        self._queue_seconds = Window()
        self._counts = dict.fromkeys(Ending, 0)
        self._num_retries = 0
        self._num_cells = 0

    @property
    def tier(self) -> Tier:
        """The tier that every job gets."""
        return self._spec.cell.tier

    @property
    def num_cells(self) -> int:
        """Jobs that run side by side, as it was made."""
        return self._spec.num_cells

    @property
    def num_workers(self) -> int:
        """Jobs that run side by side now."""
        return self._num_workers

    async def resize(self, num_workers: int) -> None:
        """See `Resizable`. Waits for cells to end; unblocked by the ends of their jobs."""
        await asyncio.to_thread(self._resize, num_workers)

    def _resize(self, num_workers: int) -> None:
        with self._lock:
            self._num_workers = num_workers
            for _ in range(num_workers):
                self._start_threads()
            self._has_work.notify_all()
            self._has_left.wait_for(lambda: self._closed or len(self._slots) <= self._num_workers)

    @property
    def process_ids(self) -> tuple[int, ...]:
        """The process that each living cell was started as."""
        cells = [slot.cell for slot in self._slots]
        return tuple(cell.process_id for cell in cells if cell is not None)

    async def run(self, job: Job) -> Execution:
        """Return what became of ``job``; see `Executor`.

        Waits for room in the queue, then for the job; unblocked by the end of others, which their
        wall clocks bound. Raises ValueError when its id stands for another job.
        """
        problem = problem_of(job, self._spec.languages)
        if problem is not None:
            return self._not_run(job, problem)
        while True:
            waiter = self._accept(job)
            if not isinstance(waiter, _Full):
                break
            await self._wait_for_room(waiter.future)
        if isinstance(waiter, Execution):
            return waiter
        try:
            return await asyncio.wrap_future(waiter)
        except asyncio.CancelledError:
            self._leave(job.job_id, waiter)
            raise

    async def close(self) -> None:
        """End every cell and every thread; jobs in progress are INFRA. Idempotent."""
        await asyncio.to_thread(self.close_blocking)

    def close_blocking(self) -> None:
        """Do the same from code that has no event loop."""
        with self._lock:
            self._closed = True
            for entry in self._entries.values():
                _cancel(entry)
            threads, self._threads = [*self._threads, *self._leaving], []
            self._has_work.notify_all()
            self._has_left.notify_all()
            while self._waiting_for_room:
                _resolve(self._waiting_for_room.popleft())
        for thread in threads:
            thread.join()
        with self._lock:
            for entry in list(self._entries.values()):
                self._finish(entry, self._not_run(entry.job, "the pool was closed"))
            self._queue.clear()

    def statistics(self) -> dict[str, float]:
        """Return counts since the start and the last latencies, by the names of metrics."""
        with self._lock:
            found: dict[str, float] = {
                "verifier/sandbox/queue_depth": len(self._queue),
                "verifier/sandbox/num_cells_started": self._num_cells,
                "verifier/sandbox/num_retries": self._num_retries,
            }
            for ending, count in self._counts.items():
                found[f"verifier/sandbox/num_{ending.value}"] = count
            for name, window in (("run", self._run_seconds), ("queue", self._queue_seconds)):
                middle, late = window.percentiles(50, 99) or (0.0, 0.0)
                found[f"verifier/sandbox/{name}_seconds/p50"] = middle
                found[f"verifier/sandbox/{name}_seconds/p99"] = late
            return found

    def _accept(self, job: Job) -> Future[Execution] | Execution | _Full:
        """Join the job of that id, or queue this one, or say that there is no room."""
        with self._lock:
            if self._closed:
                return self._not_run(job, "the pool is closed")
            known = self._recent.find(job)
            if known is not None:
                return known
            entry = self._entries.get(job.job_id)
            if entry is None or entry.cancelled:
                if len(self._queue) >= self._spec.max_queued:
                    full = _Full(future=Future())
                    self._waiting_for_room.append(full.future)
                    return full
                entry = _Entry(job=job, accepted=time.monotonic())
                self._entries[job.job_id] = entry
                self._queue.append(entry)
                self._start_threads()
                self._has_work.notify()
            elif entry.job != job:
                msg = f"job id {job.job_id!r} stands for another job already"
                raise ValueError(msg)
            waiter: Future[Execution] = Future()
            entry.waiters.append(waiter)
            return waiter

    async def _wait_for_room(self, room: Future[None]) -> None:
        """Wait until the queue is shorter; unblocked by a slot that takes a job, or by `close`."""
        try:
            await asyncio.wrap_future(room)
        except asyncio.CancelledError:
            with self._lock:
                # What was meant for this caller goes to the next one.
                if room in self._waiting_for_room:
                    self._waiting_for_room.remove(room)
                elif self._waiting_for_room:
                    _resolve(self._waiting_for_room.popleft())
            raise

    def _leave(self, job_id: str, waiter: Future[Execution]) -> None:
        with self._lock:
            entry = self._entries.get(job_id)
            if entry is None or waiter not in entry.waiters:
                return
            entry.waiters.remove(waiter)
            if entry.waiters:
                return
            _cancel(entry)
            if entry in self._queue:
                self._queue.remove(entry)
                del self._entries[job_id]
                self._make_room()

    def _start_threads(self) -> None:
        """Start one more slot if there are fewer than allowed and none is free."""
        if not self._closed and len(self._threads) < min(self._num_workers, len(self._entries)):
            slot = _Slot()
            self._slots.append(slot)
            name = f"sandbox-{len(self._threads)}"
            thread = threading.Thread(target=self._serve, args=(slot,), name=name, daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, slot: _Slot) -> None:
        """Run jobs. Waits for the next; unblocked by `_accept`, ended by `close` and `resize`."""
        try:
            while (entry := self._take(slot)) is not None:
                execution = self._attempts(slot, entry)
                with self._lock:
                    entry.slot = None
                    slot.calm()
                    self._finish(entry, execution)
                # After its caller was told, so that only the next job waits for a new cell.
                if slot.cell is not None and slot.cell.spent:
                    slot.close()
                    with contextlib.suppress(CellError):
                        self._cell_of(slot)
        finally:
            slot.close()
            with self._lock:
                self._slots.remove(slot)
                self._leaving.discard(threading.current_thread())
                self._has_left.notify_all()
                os.close(slot.wake)

    def _take(self, slot: _Slot) -> _Entry | None:
        with self._lock:
            while not self._queue and not self._is_surplus():
                if self._closed:
                    return None
                self._has_work.wait()
            if self._closed:
                return None
            if self._is_surplus():
                thread = threading.current_thread()
                self._threads.remove(thread)
                self._leaving.add(thread)
                # What it was woken for is another one's.
                self._has_work.notify()
                return None
            entry = self._queue.popleft()
            entry.slot = slot
            self._queue_seconds.add(time.monotonic() - entry.accepted)
            self._make_room()
            return entry

    def _is_surplus(self) -> bool:
        return len(self._threads) > self._num_workers

    def _make_room(self) -> None:
        if self._waiting_for_room and len(self._queue) < self._spec.max_queued:
            _resolve(self._waiting_for_room.popleft())

    def _attempts(self, slot: _Slot, entry: _Entry) -> Execution:
        """Run a job until something other than our own failure comes of it, but not for ever."""
        for attempt in range(_ATTEMPTS):
            if attempt:
                with self._lock:
                    self._num_retries += 1
                slot.close()
            try:
                execution = self._execute(slot, entry.job)
            except CellError as error:
                execution = self._not_run(entry.job, f"no cell could be started: {error}")
            # The one boundary: whatever it is, its caller waits, and so do the jobs after it.
            except Exception as error:  # noqa: BLE001 - see above
                slot.close()
                detail = f"the sandbox failed: {type(error).__name__}: {error}"
                execution = self._not_run(entry.job, detail)
            if execution.ending is not Ending.INFRA or entry.cancelled:
                break
        return execution

    def _execute(self, slot: _Slot, job: Job) -> Execution:
        if job.language == "python":
            return self._cell_of(slot).run(python_work(job), slot.wake)
        language = self._spec.languages[job.language]
        product: bytes | None = None
        if language.compile:
            made = self._product(slot, job, language)
            if isinstance(made, Execution):
                return made
            product = made
        return self._fresh(slot).run(command_work(job, language, product), slot.wake)

    def _product(self, slot: _Slot, job: Job, language: Language) -> bytes | Execution:
        """Return what the compiler makes of a program, or how it failed; each is made once."""
        key = (job.language, job.source)
        with self._lock:
            found = self._compiled.get(key)
        if found is not None:
            return found
        execution = self._fresh(slot).run(compile_work(job, language), slot.wake)
        if execution.returned is None:
            return replace(execution, detail=execution.detail or "the compiler refused it")
        with self._lock:
            self._compiled[key] = execution.returned
            while sum(map(len, self._compiled.values())) > _MAX_COMPILED_BYTES:
                self._compiled.popitem(last=False)
        return execution.returned

    def _fresh(self, slot: _Slot) -> Cell:
        cell = self._cell_of(slot)
        if cell.spent:
            slot.close()
            cell = self._cell_of(slot)
        return cell

    def _cell_of(self, slot: _Slot) -> Cell:
        """Return the slot's cell, a new one if it has none. Raises CellError."""
        for attempt in range(_START_ATTEMPTS):
            if slot.cell is not None:
                break
            try:
                slot.cell = Cell(self._spec.cell)
                with self._lock:
                    self._num_cells += 1
            except CellError:
                if attempt + 1 == _START_ATTEMPTS:
                    raise
                time.sleep(_BACK_OFF_SECONDS)
        assert slot.cell is not None
        return slot.cell

    def _finish(self, entry: _Entry, execution: Execution) -> None:
        if self._entries.get(entry.job.job_id) is entry:
            del self._entries[entry.job.job_id]
        if not entry.cancelled:
            self._counts[execution.ending] += 1
            self._run_seconds.add(execution.wall_seconds)
            self._recent.keep(entry.job, execution)
        for waiter in entry.waiters:
            if waiter.set_running_or_notify_cancel():
                waiter.set_result(execution)
        entry.waiters.clear()

    def _not_run(self, job: Job, detail: str) -> Execution:
        return Execution(job_id=job.job_id, tier=self.tier, ending=Ending.INFRA, detail=detail)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Full:
    """The queue has no room; the future resolves when that may have changed."""

    future: Future[None]


def _cancel(entry: _Entry) -> None:
    entry.cancelled = True
    if entry.slot is not None:
        entry.slot.interrupt()


def _resolve(room: Future[None]) -> None:
    if room.set_running_or_notify_cancel():
        room.set_result(None)
