"""A thread that computes: where tensors are multiplied, by which roles, and with how many cores.

Every operating-system thread that runs a parallel torch operator gets an OpenMP team of its own,
and GNU OpenMP lets idle team threads sleep instead of spin once a process has more of them than
cores: from then on every small operator pays for waking the others. So roles that take turns share
one `ComputeThread`, roles that run at the same time divide the cores among theirs, and everything
else in the process keeps to one core.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import torch

T = TypeVar("T")


class ComputeThread:
    """Does what it is given, one after another, with ``num_threads`` cores in each operator."""

    def __init__(self, name: str, num_threads: int) -> None:
        self.num_threads = num_threads
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._gate = threading.Lock()
        self._is_closed = self._is_given_up = False
        # A daemon: work that hangs must not hold the end of a process that has given up on it.
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()
        others = torch.get_num_threads()
        self.submit(self._take_cores).result()
        # What a new thread begins with is one number for the whole process; it stays as it was.
        torch.set_num_threads(others)

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Queue ``work``; the future can be cancelled until it begins.

        Raises RuntimeError once closed.
        """
        future: Future[T] = Future()

        def task() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = work()
            except BaseException as error:  # noqa: BLE001 - it belongs to whoever waits for it
                future.set_exception(error)
            else:
                future.set_result(result)

        with self._gate:
            if self._is_closed:
                msg = f"the compute thread {self._thread.name} was closed"
                raise RuntimeError(msg)
            self._tasks.put(task)
        return future

    def call(self, work: Callable[[], T]) -> T:
        """Return what ``work`` does here, at once if this is the caller's own thread.

        Else it waits for what was queued before. Raises RuntimeError once closed.
        """
        if threading.current_thread() is self._thread:
            return work()
        return self.submit(work).result()

    def close(self, timeout_seconds: float | None = None) -> None:
        """Do what was queued, then end. Idempotent. One that was given up is not waited for."""
        with self._gate:
            self._is_closed = True
            self._tasks.put(None)
        if not self._is_given_up:
            self._thread.join(timeout_seconds)

    def give_up(self) -> None:
        """Take no more work: what is being done hangs, and nothing can end it."""
        with self._gate:
            self._is_closed = self._is_given_up = True

    def _take_cores(self) -> None:
        torch.get_num_threads()  # else the first operator here would take the process's number
        torch.set_num_threads(self.num_threads)

    def _serve(self) -> None:
        """Waits for work; unblocked by `submit` and `close`."""
        while (task := self._tasks.get()) is not None:
            task()
