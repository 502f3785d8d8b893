"""``records.jsonl``: what a step did, exactly enough to do it again and compare.

Owns the lines: one a step, beside the step's rollout file, which holds what the learner was given.
A line stands alone, so that a run may be rewound and go on in another process; it carries a sum of
itself and the digest of its rollout file, so that damage is told from a difference. Numbers are
written as ``float.hex`` does, which loses no bit and knows infinities. Computes nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.errors import RunDirectoryError
from headrace.monitors.rollouts import digest, read_rollouts
from headrace.monitors.run_directory import RECORDS_FILE, read_lines, rollout_file
from headrace.types import RolloutGroup

_SUM = "sum"
"""Key of the digest of everything else in a line."""

Facts = Mapping[str, str | int]
"""What decides the last bits of a step beside its batch: versions, processor, threads, layout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """One version of the policy, as it was published."""

    policy_version: int
    checksum: int
    """``models.weights.checksum``, in the generators' dtype."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedStep:
    """One line."""

    step: int
    before: Weights
    """What the step began with."""
    after: Weights
    """The same as ``before`` where no update was made."""
    metrics: Mapping[str, float]
    """The learner's, and what the controller says of it."""
    rollouts: str
    """`digest` of the step's rollout file."""
    facts: Facts


def append_record(directory: Path, record: RecordedStep) -> None:
    """Add a line to the records of the run in ``directory``.

    The file is opened anew each time, since rewinding replaces it. Raises OSError.
    """
    line = {
        "step": record.step,
        "before": _to_json(record.before),
        "after": _to_json(record.after),
        "metrics": {name: float(value).hex() for name, value in record.metrics.items()},
        "rollouts": record.rollouts,
        "facts": dict(record.facts),
    }
    with (directory / RECORDS_FILE).open("a", encoding="utf-8") as file:
        # One write, so a kill can tear the last line at most.
        file.write(json.dumps(line | {_SUM: _sum(line)}) + "\n")


def read_records(directory: Path) -> dict[int, RecordedStep]:
    """Return the recorded steps of a run by their numbers, a step recorded twice as it was last.

    Raises RunDirectoryError where there is no record, or a damaged one.
    """
    path = directory / RECORDS_FILE
    lines = read_lines(path)
    if not lines:
        msg = (
            f"{directory}: no step is on record (no {RECORDS_FILE}); train with "
            'monitors.record = "steps"'
        )
        raise RunDirectoryError(msg)
    records = [_from_json(path, line) for line in lines]
    return {record.step: record for record in records}


def read_batch(directory: Path, record: RecordedStep) -> tuple[RolloutGroup, ...]:
    """Return what the learner was given in a recorded step, in order.

    Raises RunDirectoryError unless the rollout file is the one that was recorded.
    """
    path = rollout_file(directory, "step", record.step)
    try:
        found = digest(path)
    except OSError as error:
        msg = f"{path}: step {record.step} is on record, its rollouts are not there ({error})"
        raise RunDirectoryError(msg) from error
    if found != record.rollouts:
        msg = (
            f"{path}: not the file that was recorded (its digest is {found}, that on record "
            f"{record.rollouts}); restore it"
        )
        raise RunDirectoryError(msg)
    return read_rollouts(path)


def _to_json(weights: Weights) -> dict[str, Any]:
    return {"policy_version": weights.policy_version, "checksum": f"{weights.checksum:016x}"}


def _from_json(path: Path, line: Mapping[str, Any]) -> RecordedStep:
    content = {key: value for key, value in line.items() if key != _SUM}
    if line.get(_SUM) != _sum(content):
        msg = (
            f"{path}: the record of step {line['step']} is damaged (its sum does not agree); "
            "restore the file"
        )
        raise RunDirectoryError(msg)
    try:
        return RecordedStep(
            step=content["step"],
            before=_weights(content["before"]),
            after=_weights(content["after"]),
            metrics={name: float.fromhex(value) for name, value in content["metrics"].items()},
            rollouts=content["rollouts"],
            facts=content["facts"],
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        msg = (
            f"{path}: the record of step {line['step']} is of another layout ({error!r}); replay "
            f"it with the headrace that wrote it"
        )
        raise RunDirectoryError(msg) from error


def _weights(fields: Mapping[str, Any]) -> Weights:
    return Weights(
        policy_version=fields["policy_version"], checksum=int(fields["checksum"], base=16)
    )


def _sum(line: Mapping[str, Any]) -> str:
    """Return the digest of a line, however its keys are ordered: rewinding writes it again."""
    text = json.dumps(line, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
