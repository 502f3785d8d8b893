"""Ctrl-C: once asks the controller to stop after the step, twice stops at once.

Stopping at once still waits for what a thread cannot be made to drop, such as a step in the middle
of its arithmetic. A third interrupt waits for nothing: the process dies by it, which costs no more
than a kill does, since everything on the disk is written so as to survive one. SIGTERM asks for
the same as the first Ctrl-C, however often it comes: whoever ends a service or a job sends it to
every process of it, and those that started a run pass it on.
"""

from __future__ import annotations

import asyncio
import signal
import sys

from headrace.controller import Controller, RunOutcome
from headrace.runtime.local import LocalRun

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def run_interruptibly(run: LocalRun) -> RunOutcome | None:
    """Train; None when a second interrupt ended it. SIGTERM counts as a first one."""
    return asyncio.run(_run(run))


async def _run(run: LocalRun) -> RunOutcome | None:
    loop = asyncio.get_running_loop()
    work = asyncio.current_task()
    assert work is not None
    interrupts = _Interrupts(work)
    for number in _SIGNALS:
        loop.add_signal_handler(number, interrupts.receive, number)
    try:
        return await run.train(on_start=interrupts.watch)
    except asyncio.CancelledError:
        if not interrupts.stop_at_once:
            raise
        work.uncancel()
        return None
    finally:
        if not interrupts.stop_at_once:
            for number in _SIGNALS:
                loop.remove_signal_handler(number)
            if interrupts.is_stopping:
                # A second Ctrl-C that comes only now finds everything done, and need not kill.
                signal.signal(signal.SIGINT, signal.SIG_IGN)


class _Interrupts:
    """Counts signals. Waits for nothing: each is acted on when it comes."""

    def __init__(self, work: asyncio.Task[object]) -> None:
        self._work = work
        self._controller: Controller | None = None
        self._count = 0
        self.stop_at_once = False

    @property
    def is_stopping(self) -> bool:
        """Whether an interrupt came."""
        return self._count > 0

    def watch(self, controller: Controller) -> None:
        """Remember whom to ask; an interrupt that came earlier counts."""
        self._controller = controller
        if self._count:
            controller.request_stop()

    def receive(self, number: signal.Signals) -> None:
        """Handle one signal."""
        if number == signal.SIGTERM and self._count:
            return
        self._count += 1
        if self._count == 1:
            sys.stderr.write("\nfinishing the step; press Ctrl-C again to stop at once\n")
            if self._controller is not None:
                self._controller.request_stop()
            return
        self.stop_at_once = True
        loop = asyncio.get_running_loop()
        for each in _SIGNALS:
            loop.remove_signal_handler(each)
            signal.signal(each, signal.SIG_DFL)
        self._work.cancel()
