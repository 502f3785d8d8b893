"""Metrics and events as JSON Lines: ``metrics.jsonl`` and ``events.jsonl``.

Owns the rule that every line is complete, strict JSON and on its way to the disk when the call
returns: NaN and infinity, which JSON does not have, become null and their names are listed under
``nonfinite``. Reading back and rewinding is `run_directory`'s part.
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from headrace.monitors.metrics import evaluation_mode
from headrace.monitors.run_directory import EVENTS_FILE, METRICS_FILE
from headrace.types import EvaluationRecord, RolloutGroup, RunEvent, StepRecord


class JsonlMonitor:
    """Appends one line for each record. The files are made at once, so that a run is visible."""

    def __init__(self, directory: Path, *, clock: Callable[[], float] = time.time) -> None:
        """Open both files in ``directory``, which exists. Raises OSError."""
        self._clock = clock
        self._directory = directory
        self._open()

    def _open(self) -> None:
        # Line-buffered: each record is one write, so a kill can tear the last line at most.
        self._metrics = (self._directory / METRICS_FILE).open("a", buffering=1, encoding="utf-8")
        self._events = (self._directory / EVENTS_FILE).open("a", buffering=1, encoding="utf-8")

    def reopen(self) -> None:
        """Go on at the end of the files that lie there now: `rewind` replaces them.

        Raises OSError.
        """
        self.close()
        self._open()

    def on_step(self, record: StepRecord) -> None:
        """Append a line of kind ``step``."""
        self._write_metrics("step", record, {})

    def on_evaluation(self, record: EvaluationRecord) -> None:
        """Append a line of kind ``evaluation`` with the sampling of each mode."""
        self._write_metrics("evaluation", record, {"sampling": _sampling(record.groups)})

    def on_event(self, event: RunEvent) -> None:
        """Append a line to the events."""
        line = {
            "time": self._clock(),
            "kind": event.kind,
            "step": event.step,
            "message": event.message,
            "fields": event.fields,
        }
        self._events.write(_json(line))

    def close(self) -> None:
        """Close both files. Idempotent."""
        self._metrics.close()
        self._events.close()

    def _write_metrics(
        self, kind: str, record: StepRecord | EvaluationRecord, more: Mapping[str, object]
    ) -> None:
        line = {
            "kind": kind,
            "step": record.step,
            "time": self._clock(),
            "policy_version": record.policy_version,
            "metrics": record.metrics,
            **more,
        }
        nonfinite = sorted(name for name, x in record.metrics.items() if not math.isfinite(x))
        if nonfinite:
            line["nonfinite"] = nonfinite
        self._metrics.write(_json(line))


def _sampling(groups: Sequence[RolloutGroup]) -> dict[str, object]:
    """Return mode -> sampling parameters; all groups of a mode share theirs."""
    return {evaluation_mode(group): dataclasses.asdict(group.sampling) for group in groups}


def _json(line: Mapping[str, object]) -> str:
    return json.dumps(_finite(line), allow_nan=False) + "\n"


def _finite(value: object) -> object:
    """Return ``value`` as strict JSON can hold it; what JSON does not know becomes text."""
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else None
        case Mapping():
            return {str(key): _finite(item) for key, item in value.items()}
        case list() | tuple():
            return [_finite(item) for item in value]
        case _:
            return str(value)
