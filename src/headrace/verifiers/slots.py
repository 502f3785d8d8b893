"""Places to work at, and what is known of the wait for them.

Whatever scores by processes or calls has so many places; jobs queue for them in order of arrival.
Nothing limits the queue here: the buffer's slots bound the groups that are under way, and so the
jobs. A job that is cancelled, waiting or at work, frees its place at once. The figures are read
from another thread than the one that takes places.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotFigures:
    """What happened between two readings."""

    num_slots: float
    """On average, where their number changed."""
    elapsed_seconds: float
    busy_seconds: float
    """Of all places together."""
    num_jobs: int
    """Jobs that came to an end."""
    max_waiting: int
    """The longest queue."""
    num_cancelled: int
    num_retries: int


class Slots:
    """A semaphore that can say how it is used. Belongs to the event loop that first waits."""

    def __init__(self, count: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._count = count
        self._clock = clock
        self._places = asyncio.Semaphore(count)
        # All below is written by one thread and read by another.
        self._lock = threading.Lock()
        self._waiting = self._working = 0
        self._read_at = self._changed_at = clock()
        self._busy = 0.0
        self._moved = 0.0
        """Seconds of places that there were not yet, or still, since the last reading."""
        self._num_jobs = self._max_waiting = self._num_cancelled = self._num_retries = 0

    @asynccontextmanager
    async def taken(self) -> AsyncIterator[None]:
        """Wait for a place and hold it; what unblocks the wait is the end of another job."""
        self._change(waiting=1)
        try:
            await self._places.acquire()
        except BaseException:
            self._change(waiting=-1, cancelled=1)
            raise
        self._change(waiting=-1, working=1)
        ended, cancelled = 1, 0
        try:
            yield
        except asyncio.CancelledError:
            ended, cancelled = 0, 1
            raise
        finally:
            self._change(working=-1, ended=ended, cancelled=cancelled)
            self._places.release()

    def note_waiting(self, count: int, *, num_cancelled: int = 0) -> None:
        """Count jobs that begin to wait, or with a ``count`` below 0 stop waiting for nothing.

        This and the three below are for who gives places to several jobs at once.
        """
        self._change(waiting=count, cancelled=num_cancelled)

    def note_count(self, count: int) -> None:
        """Count with ``count`` places from now on."""
        self._change()
        with self._lock:
            self._moved += (self._count - count) * (self._changed_at - self._read_at)
            self._count = count

    def note_begun(self, num_jobs: int) -> None:
        """Count a place that works, on jobs that have waited."""
        self._change(waiting=-num_jobs, working=1)

    def note_ended(self, num_jobs: int, *, num_back: int = 0, num_cancelled: int = 0) -> None:
        """Count a place that works no more, jobs that ended and those that wait again."""
        self._change(waiting=num_back, working=-1, ended=num_jobs, cancelled=num_cancelled)

    def note_retry(self) -> None:
        """Count a job that is tried once more."""
        with self._lock:
            self._num_retries += 1

    def read(self) -> SlotFigures:
        """Return what happened since the last reading."""
        self._change()
        with self._lock:
            elapsed = self._changed_at - self._read_at
            moved, self._moved = self._moved, 0.0
            figures = SlotFigures(
                num_slots=self._count + moved / elapsed if moved else self._count,
                elapsed_seconds=elapsed,
                busy_seconds=self._busy,
                num_jobs=self._num_jobs,
                max_waiting=self._max_waiting,
                num_cancelled=self._num_cancelled,
                num_retries=self._num_retries,
            )
            self._read_at, self._busy = self._changed_at, 0.0
            self._max_waiting = self._waiting
            self._num_jobs = self._num_cancelled = self._num_retries = 0
        return figures

    def _change(
        self, *, waiting: int = 0, working: int = 0, ended: int = 0, cancelled: int = 0
    ) -> None:
        with self._lock:
            now = self._clock()
            self._busy += self._working * (now - self._changed_at)
            self._changed_at = now
            self._waiting += waiting
            self._working += working
            self._num_jobs += ended
            self._num_cancelled += cancelled
            # One that finds a free place at once has not waited; those beyond the places do.
            queue = self._waiting + self._working - self._count
            self._max_waiting = max(self._max_waiting, queue)


def slot_metrics(role: str, figures: Iterable[SlotFigures]) -> dict[str, float]:
    """Return the metrics of all places of one kind, below ``role``."""
    parts = tuple(figures)
    room = sum(part.num_slots * part.elapsed_seconds for part in parts)
    metrics = {
        f"{role}/slots/num_jobs": float(sum(part.num_jobs for part in parts)),
        f"{role}/slots/num_cancelled": float(sum(part.num_cancelled for part in parts)),
        f"{role}/slots/num_retries": float(sum(part.num_retries for part in parts)),
        f"{role}/slots/max_waiting": float(max((part.max_waiting for part in parts), default=0)),
    }
    if room > 0.0:
        metrics[f"{role}/slots/utilisation"] = sum(part.busy_seconds for part in parts) / room
    return metrics
