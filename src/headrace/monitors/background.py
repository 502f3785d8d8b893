"""Writing beside a run: one thread, in the order of what it is given, with a bound on what waits.

Owns: nothing is written out of order, a failure is told to whoever comes next, and after one
nothing more is written, since what follows a gap could not be used. Knows no files.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

MAX_PENDING = 4
"""Pieces of work that wait at most: each holds the rollouts of a step in memory."""

PATIENCE_SECONDS = 300.0
"""A disk that takes longer than this for what is under way counts as failed."""


class BackgroundWriter:
    """Does what it is given on a thread of its own, one after another."""

    def __init__(
        self,
        name: str,
        *,
        max_pending: int = MAX_PENDING,
        patience_seconds: float = PATIENCE_SECONDS,
    ) -> None:
        self._name = name
        self._patience_seconds = patience_seconds
        self._tasks: queue.Queue[Callable[[], object] | None] = queue.Queue(max_pending)
        self._failure: Exception | None = None
        # A daemon: a disk that hangs must not hold the end of a process that has given up on it.
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], object]) -> None:
        """Queue ``work``; waits for room, which the thread makes.

        Raises the first failure of what was queued before, every time, and TimeoutError.
        """
        self._raise_failure()
        self._put(work)

    def flush(self) -> None:
        """Return once all that was queued is written, which the thread sees to.

        Raises the first failure, every time, and TimeoutError.
        """
        done = self._tasks.all_tasks_done
        with done:
            if not done.wait_for(lambda: not self._tasks.unfinished_tasks, self._patience_seconds):
                raise self._too_slow()
        self._raise_failure()

    def close(self) -> None:
        """Write what is left and end the thread; the second time there is nothing to do.

        Raises as `flush` does.
        """
        if not self._thread.is_alive():
            return
        self._put(None)
        self._thread.join(self._patience_seconds)
        if self._thread.is_alive():
            raise self._too_slow()
        self._raise_failure()

    def _put(self, task: Callable[[], object] | None) -> None:
        try:
            self._tasks.put(task, timeout=self._patience_seconds)
        except queue.Full as full:
            raise self._too_slow() from full

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _too_slow(self) -> TimeoutError:
        return TimeoutError(
            f"{self._name}: {self._tasks.unfinished_tasks} writes were not done within "
            f"{self._patience_seconds:.0f} s; see whether the disk still answers"
        )

    def _serve(self) -> None:
        """Waits for work; unblocked by `submit` and `close`."""
        while (task := self._tasks.get()) is not None:
            try:
                if self._failure is None:
                    task()
            except Exception as error:  # noqa: BLE001 - it belongs to whoever writes next
                self._failure = error
            finally:
                self._tasks.task_done()
        self._tasks.task_done()
