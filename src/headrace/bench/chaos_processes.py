"""The processes below a run that is watched from outside: by role, and none forgotten.

A process that was seen once is known by its number and the time of its start until it has ended,
whoever its parent is by then.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path

from headrace.verifiers.sandbox.watch import descendants

_ROLES: Mapping[str, str] = {
    "headrace.learners.parallel.rank": "rank",
    "headrace.verifiers.worker": "verifier",
    "headrace.generators.pool.hosted": "generator",
    "zygote.start": "cell",
}
"""What stands in a command line, and whose it is."""
CONTROLLER = "controller"
_STATE, _STARTED = 0, 19
"""Where they stand in /proc/PID/stat after the name; see proc(5)."""


class Processes:
    """Everything that was ever seen below one process."""

    def __init__(self, root: int) -> None:
        """``root``: the process that starts the run, and starts it again."""
        self._root = root
        self._started: dict[int, str] = {}

    def look(self) -> Mapping[str, list[int]]:
        """Return role -> processes that are alive now."""
        found: dict[str, list[int]] = {}
        for pid in list(descendants(self._root)):
            fields = _stat(pid)
            if fields is None or fields[_STATE] == "Z":
                continue
            self._started[pid] = fields[_STARTED]
            if role := self._role_of(pid):
                found.setdefault(role, []).append(pid)
        return found

    def alive(self) -> list[int]:
        """Return those of all ever seen that have not ended."""
        return [pid for pid in self._started if self._is_alive(pid)]

    def kill(self, pid: int) -> bool:
        """Kill one that was seen; False where it had ended."""
        if not self._is_alive(pid):
            return False
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return False
        return True

    def _is_alive(self, pid: int) -> bool:
        fields = _stat(pid)
        known = self._started.get(pid)
        return fields is not None and fields[_STATE] != "Z" and fields[_STARTED] == known

    def _role_of(self, pid: int) -> str | None:
        command = _read(pid, "cmdline")
        for part, role in _ROLES.items():
            if part in command:
                return role
        # A fork of the process that starts it, and so the same command.
        return CONTROLLER if command == _read(self._root, "cmdline") else None


def _stat(pid: int) -> list[str] | None:
    """Return the kernel's line on ``pid`` after the name; None without such a process."""
    fields = _read(pid, "stat").rpartition(")")[2].split()
    return fields or None


def _read(pid: int, file: str) -> str:
    try:
        return Path(f"/proc/{pid}/{file}").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
