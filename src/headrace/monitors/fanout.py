"""One monitor that passes everything on to several.

Owns the rule that watching never changes a run: a monitor that raises is reported once, to the log
and to the other monitors, and hears nothing more. Building a monitor is outside of this boundary:
a monitor that cannot start does stop the run, before any work.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from headrace.roles import Monitor
from headrace.types import EvaluationRecord, RunEvent, StepRecord

_LOG = logging.getLogger(__name__)


class FanoutMonitor:
    """Passes each record to every monitor that still works, in the order given."""

    def __init__(self, monitors: Sequence[Monitor]) -> None:
        self._working: list[Monitor] = list(monitors)
        self._step = 0

    def on_step(self, record: StepRecord) -> None:
        """Pass a step on."""
        self._step = record.step
        self._each(lambda monitor: monitor.on_step(record), record.step)

    def on_evaluation(self, record: EvaluationRecord) -> None:
        """Pass an evaluation on."""
        self._each(lambda monitor: monitor.on_evaluation(record), record.step)

    def on_event(self, event: RunEvent) -> None:
        """Pass an event on."""
        self._step = event.step
        self._each(lambda monitor: monitor.on_event(event), event.step)

    def tell(self, kind: str, message: str, fields: Mapping[str, object]) -> None:
        """Pass on an event of somebody who knows no steps: it is of the last one heard of."""
        self.on_event(RunEvent(kind=kind, step=self._step, message=message, fields=fields))

    def close(self) -> None:
        """Close every monitor that still works; one that fails does not keep the others open.

        One after another, so that those behind it still hear of a failure.
        """
        while self._working:
            monitor = self._working.pop(0)
            try:
                monitor.close()
            except Exception as error:  # noqa: BLE001 - see `_each`
                self.on_event(_failure(monitor, error, self._step))

    def _each(self, call: Callable[[Monitor], None], step: int) -> None:
        """Call every working monitor. Ends: each round of failures has fewer monitors to tell."""
        failures: list[RunEvent] = []
        for monitor in tuple(self._working):
            try:
                call(monitor)
            except Exception as error:  # noqa: BLE001 - the one boundary: watching never ends a run
                self._working.remove(monitor)
                failures.append(_failure(monitor, error, step))
        for failure in failures:
            self.on_event(failure)


def _failure(monitor: Monitor, error: Exception, step: int) -> RunEvent:
    name = type(monitor).__name__
    message = f"{name} failed and is switched off; the run goes on without it: {error!r}"
    _LOG.error(message, exc_info=error)
    return RunEvent(kind="monitor_failed", step=step, message=message, fields={"monitor": name})
