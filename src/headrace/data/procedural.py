"""Rows made by a task of the reasoning-gym package (extra ``envs``).

Invariant: the same source gives the same rows in every process. Some tasks depend on the order of
sets or on generators nobody seeds, so the rows are made in a process of their own (see
`headrace.data.procedural_rows`) whose every source of chance is fixed.

Every row has the columns ``question``, ``answer`` and ``metadata``, as the package makes them.
The package makes row i from ``seed + i``, so two seeds closer than ``size`` share most of their
rows; `headrace.data.prompts` takes shared ones out. The package's scorers are not used here.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NoReturn

from headrace.config import ReasoningGymSource
from headrace.data.rows import Row
from headrace.errors import ConfigError, DataError

_PROGRAM = Path(__file__).with_name("procedural_rows.py")
_ROW_SECONDS = 120
"""For the import and for each row; then the process ends itself."""


def read_task(source: ReasoningGymSource) -> Iterator[Row]:
    """Yield ``source.size`` rows.

    Raises ConfigError naming the key that is wrong, DataError for a row that cannot be made.
    Waits for the process that makes the rows: it answers or ends within `_ROW_SECONDS` a row.
    """
    _require_package()
    with tempfile.TemporaryFile() as complaints, _started(source, complaints) as process:
        assert process.stdout is not None
        number = 0
        try:
            for number, line in enumerate(process.stdout, start=1):
                yield Row(number=number, values=_row(source, number, json.loads(line)))
            if number < source.size:
                raise DataError(_ended_early(source, number + 1, process.wait(), complaints))
        finally:
            process.kill()


def _require_package() -> None:
    if importlib.util.find_spec("reasoning_gym") is None:
        _not_imported("it is not installed")


def _not_imported(reason: str) -> NoReturn:
    msg = (
        f'type = "reasoning_gym": the package cannot be imported ({reason}); '
        "run `pip install -c constraints.txt -e '.[envs]'` in headrace's source folder"
    )
    raise ConfigError(msg)


def _started(source: ReasoningGymSource, complaints: IO[bytes]) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(  # noqa: S603 - our own program by its path, no shell
        # -P: the folder of the program holds names that a package may want to import itself.
        [sys.executable, "-P", str(_PROGRAM)],
        env=os.environ | {"PYTHONHASHSEED": "0"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=complaints,
    )
    request = {
        "task": source.task,
        "size": source.size,
        "seed": source.seed,
        "options": source.options,
        "row_seconds": _ROW_SECONDS,
    }
    assert process.stdin is not None
    # A process that ended at once says why in its status.
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(json.dumps(request).encode())
        process.stdin.close()
    return process


def _row(source: ReasoningGymSource, number: int, answer: dict[str, Any]) -> dict[str, object]:
    """Return the row in one line of the process; raises what it says is wrong."""
    match answer:
        case {"row": dict() as row}:
            return row
        case {"not_imported": str() as reason}:
            _not_imported(reason)
        case {"problems": list() as problems}:
            raise ConfigError(*problems)
        case _:
            raise DataError(_unmade(source, number, str(answer.get("failed", answer))))


def _unmade(source: ReasoningGymSource, number: int, reason: str) -> str:
    return (
        f"reasoning_gym task {source.task}, row {number}: it cannot be made ({reason}); "
        f"change the options, options = {source.options}, or take another task"
    )


def _ended_early(
    source: ReasoningGymSource, number: int, status: int, complaints: IO[bytes]
) -> str:
    if status == -signal.SIGALRM:
        return _unmade(source, number, f"it took longer than {_ROW_SECONDS} s")
    complaints.seek(0)
    lines = complaints.read().decode(errors="replace").strip().splitlines()
    said = f": {lines[-1]}" if lines else ""
    return _unmade(source, number, f"its process ended with exit status {status}{said}")
