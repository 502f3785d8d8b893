"""The processes and shared memory that one start of vLLM made, and how all of them are ended.

vLLM's queues between its processes are named segments that a killed process leaves behind; their
names are read from the memory maps while it lives. Linux only, as vLLM is.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where the system keeps it
_TICK_SECONDS = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessTree:
    """What there was to end at the moment of looking."""

    pids: tuple[int, ...]
    """The roots and all their descendants."""
    segments: tuple[Path, ...]
    """Named shared memory that they have mapped."""

    @classmethod
    def below(cls, roots: Iterable[int]) -> ProcessTree:
        """Look at the processes ``roots`` and below."""
        pids = tuple(dict.fromkeys(pid for root in roots for pid in _family(root)))
        segments = {path for pid in pids for path in _mapped_segments(pid)}
        return cls(pids=pids, segments=tuple(sorted(segments)))

    def end(self, timeout_seconds: float) -> None:
        """Kill every process, wait until all are gone, and unlink their segments."""
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + timeout_seconds
        while any(is_running(pid) for pid in self.pids) and time.monotonic() < deadline:
            time.sleep(_TICK_SECONDS)
        for path in self.segments:
            path.unlink(missing_ok=True)


def is_running(pid: int) -> bool:
    """Whether ``pid`` is a process that has not ended; a zombie has."""
    stat = _stat(pid)
    return stat is not None and stat[0] != "Z"


def _family(root: int) -> list[int]:
    """Return ``root`` and its descendants, parents first."""
    parents = {
        int(path.name): int(stat[1])
        for path in Path("/proc").glob("[0-9]*")
        if (stat := _stat(int(path.name))) is not None
    }
    found = [root]
    for pid in found:  # grows while it is walked
        found += [child for child, parent in parents.items() if parent == pid]
    return found


def _stat(pid: int) -> list[str] | None:
    """Return state, parent and what follows them in the kernel's line; None without a process."""
    try:
        line = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return line.rpartition(")")[2].split()


def _mapped_segments(pid: int) -> set[Path]:
    try:
        maps = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8")
    except OSError:
        return set()
    names = re.findall(rf"{SHARED_MEMORY}/(\S+)$", maps, re.MULTILINE)
    return {SHARED_MEMORY / name for name in names}
