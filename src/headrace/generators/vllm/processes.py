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
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import resource_tracker
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where the system keeps it
FOLDER_PREFIX = "hr-vllm-"
"""Of the folder for temporary files that each start has; short, as sockets in it have 107 bytes."""
_TICK_SECONDS = 0.02
_STARTED = 19
"""Where the time of the start stands in what `_stat` returns: field 22 of proc(5)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessTree:
    """What there was to end at the moment of looking."""

    started: dict[int, str]
    """The roots and all their descendants, and when the kernel says that each of them started: a
    number that another process has got since is not theirs."""
    segments: tuple[Path, ...]
    """Named shared memory that they have mapped."""

    @classmethod
    def below(cls, roots: Iterable[int]) -> ProcessTree:
        """Look at the processes ``roots`` and below."""
        pids = dict.fromkeys(pid for root in roots for pid in _family(root))
        started = {pid: stat[_STARTED] for pid in pids if (stat := _stat(pid)) is not None}
        segments = {path for pid in started for path in _mapped_segments(pid)}
        return cls(started=started, segments=tuple(sorted(segments)))

    @classmethod
    def with_variable(cls, name: str, value: str) -> ProcessTree:
        """Look at the processes that were started with an environment variable, and below."""
        setting = f"{name}={value}".encode()
        numbers = (int(path.name) for path in Path("/proc").glob("[0-9]*"))
        return cls.below(pid for pid in numbers if setting in _environment(pid))

    @property
    def pids(self) -> tuple[int, ...]:
        """The processes, parents first."""
        return tuple(self.started)

    def has(self, pid: int) -> bool:
        """Whether ``pid`` is one of these processes and has not ended."""
        stat = _stat(pid)
        return stat is not None and stat[0] != "Z" and stat[_STARTED] == self.started.get(pid)

    def joined(self, other: ProcessTree) -> ProcessTree:
        """Return both."""
        return ProcessTree(
            started={**self.started, **other.started},
            segments=tuple(sorted({*self.segments, *other.segments})),
        )

    def end(self, timeout_seconds: float) -> None:
        """Kill every process, wait until all are gone, and unlink their segments."""
        for pid in filter(self.has, self.pids):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + timeout_seconds
        while any(map(self.has, self.pids)) and time.monotonic() < deadline:
            time.sleep(_TICK_SECONDS)
        for path in self.segments:
            path.unlink(missing_ok=True)


@contextmanager
def interrupts_kept_out() -> Iterator[None]:
    """Let no process that this thread starts inside ever get SIGINT or SIGTERM.

    Ctrl-C at a terminal reaches every process of the group, as a batch system's SIGTERM does, and
    vLLM's would stop at once while the run goes on to the end of its step. A blocked signal stays
    blocked in all that is started below.
    """
    # It unblocks the signals in the thread that it is started by, which would be this one.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


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


def _environment(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def _mapped_segments(pid: int) -> set[Path]:
    """Return the segments of Python's `multiprocessing.shared_memory` that ``pid`` has mapped.

    vLLM's queues are such. Whatever else lies in shared memory (a model that somebody put there) is
    not the engine's to unlink.
    """
    try:
        maps = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return set()
    names = re.findall(rf"{SHARED_MEMORY}/(psm_\w+)$", maps, re.MULTILINE)
    return {SHARED_MEMORY / name for name in names}
