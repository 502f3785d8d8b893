"""What lies in a run directory: names, reading it back, and rewinding it for a resume.

Owns the record of a run as files: a line with a step beyond the checkpoint that a run resumes from
never survives, unless it tells what happened to a process, which no checkpoint takes back; and a
line that a kill tore in two is never taken for a record. It does not write
new records (`jsonl`, `rollouts`) and does not touch checkpoints or the ledger.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.errors import RunDirectoryError

CONFIG_FILE = "config.json"
METRICS_FILE = "metrics.jsonl"
EVENTS_FILE = "events.jsonl"
RECORDS_FILE = "records.jsonl"
ROLLOUTS_FOLDER = "rollouts"
REPORT_FILE = "report.html"
ALARM = "alarm"
"""Kind of an event that an alarm is recorded as."""

_OF_PROCESSES = frozenset(
    ("learner_restart", "generator_lost", "generator_restart", "generator_given_up")
)
"""Kinds of events that stay, whatever is made again."""

_ROLLOUT_FILE = re.compile(r"(step|eval)-(\d+)\.parquet")

Line = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsLine:
    """One line of ``metrics.jsonl``."""

    step: int
    time: float
    """Unix seconds at which it was written."""
    policy_version: int
    metrics: Mapping[str, float]
    """Finite ones only."""
    sampling: Mapping[str, Mapping[str, object]]
    """Evaluation mode -> sampling parameters; empty for a training step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EventLine:
    """One line of ``events.jsonl``."""

    step: int
    time: float
    """Unix seconds at which it was written."""
    kind: str
    message: str
    fields: Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunHistory:
    """Everything a run directory says of its run, in order of steps."""

    directory: Path
    config: Mapping[str, Any]
    """As JSON: a run of an older version must stay readable, so it is not parsed as RunConfig."""
    steps: tuple[MetricsLine, ...]
    evaluations: tuple[MetricsLine, ...]
    events: tuple[EventLine, ...]
    """In order of time."""

    @property
    def times(self) -> tuple[float, ...]:
        """Unix seconds of everything that was recorded, in no order."""
        lines = (*self.steps, *self.evaluations)
        return (*(line.time for line in lines), *(event.time for event in self.events))


def read_run(directory: Path) -> RunHistory:
    """Return the history in ``directory``, of a run that may still be going on.

    Where a step was recorded twice the later record counts. Raises RunDirectoryError when the
    directory holds no run or a file of it is damaged.
    """
    for name in (CONFIG_FILE, METRICS_FILE):
        if not (directory / name).is_file():
            msg = f"{directory}: holds no run, {name} is missing; name a directory `train` wrote"
            raise RunDirectoryError(msg)
    lines = read_lines(directory / METRICS_FILE)
    return RunHistory(
        directory=directory,
        config=_read_config(directory / CONFIG_FILE),
        steps=_metrics_lines(lines, "step"),
        evaluations=_metrics_lines(lines, "evaluation"),
        events=tuple(_event_line(line) for line in read_lines(directory / EVENTS_FILE)),
    )


def rewind(directory: Path, step: int) -> None:
    """Forget everything made after ``step``, and a torn last line, before a resume.

    Each file is replaced atomically, so that a kill at any moment leaves the old or the new one.
    A file that is not there yet is no error. Raises RunDirectoryError for a damaged line.
    """
    for name in (METRICS_FILE, EVENTS_FILE, RECORDS_FILE):
        path = directory / name
        if path.exists():
            kept = [line for line in read_lines(path) if line["step"] <= step or _stays(line)]
            replace_file(path, "".join(json.dumps(line) + "\n" for line in kept).encode())
    for path, _, recorded in rollout_files(directory):
        if recorded > step:
            path.unlink()


def _stays(line: Line) -> bool:
    return line.get("kind") in _OF_PROCESSES


def rollout_files(directory: Path) -> Iterator[tuple[Path, str, int]]:
    """Yield path, kind (``step`` or ``eval``) and step of every rollout file, in order of steps."""
    found = []
    for path in (directory / ROLLOUTS_FOLDER).glob("*.parquet"):
        match = _ROLLOUT_FILE.fullmatch(path.name)
        if match:
            found.append((int(match[2]), match[1], path))
    for step, kind, path in sorted(found):
        yield path, kind, step


def rollout_file(directory: Path, kind: str, step: int) -> Path:
    """Return the path of the rollouts of one step (kind ``step``) or evaluation (``eval``)."""
    return directory / ROLLOUTS_FOLDER / f"{kind}-{step:06d}.parquet"


def replace_file(path: Path, content: bytes) -> None:
    """Write ``path`` so that a reader or a crash sees all of the old or all of the new content."""
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def _read_config(path: Path) -> Line:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        msg = f"{path}: {error}; restore the file, or start a new run"
        raise RunDirectoryError(msg) from error
    if not isinstance(config, dict):
        msg = f"{path}: holds {type(config).__name__}, not a JSON object; start a new run"
        raise RunDirectoryError(msg)
    return config


def read_lines(path: Path) -> list[Line]:
    """Return the records of a JSON Lines file, without a torn last one; [] if there is no file."""
    if not path.exists():
        return []
    # Bytes and \n alone: str.splitlines would also split at U+2028 inside a text.
    raw = path.read_bytes().split(b"\n")
    lines = []
    for index, text in enumerate(raw):
        if not text:
            continue
        line = _parsed(text)
        if line is not None:
            lines.append(line)
        elif index + 1 < len(raw):
            msg = f"{path} line {index + 1}: not a record; delete the line, or restore the file"
            raise RunDirectoryError(msg)
    return lines


def _parsed(text: bytes) -> Line | None:
    try:
        line = json.loads(text)
    except ValueError:
        return None
    return line if isinstance(line, dict) and isinstance(line.get("step"), int) else None


def _metrics_lines(lines: Sequence[Line], kind: str) -> tuple[MetricsLine, ...]:
    by_step = {line["step"]: line for line in lines if line.get("kind") == kind}
    return tuple(_metrics_line(by_step[step]) for step in sorted(by_step))


def _metrics_line(line: Line) -> MetricsLine:
    metrics = line.get("metrics", {})
    return MetricsLine(
        step=line["step"],
        time=line.get("time", 0.0),
        policy_version=line.get("policy_version", 0),
        metrics={name: float(value) for name, value in metrics.items() if value is not None},
        sampling=line.get("sampling", {}),
    )


def _event_line(line: Line) -> EventLine:
    return EventLine(
        step=line["step"],
        time=line.get("time", 0.0),
        kind=line.get("kind", ""),
        message=line.get("message", ""),
        fields=line.get("fields", {}),
    )
