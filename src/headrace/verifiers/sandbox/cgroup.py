"""A memory limit on all processes of a cell together, where this process may make a cgroup.

Owns: nothing it made is left after `remove`. Where no cgroup can be written, `watch` counts memory
from outside instead, a little later than the kernel would.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_NUMBERS = itertools.count()
_PAGE = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class _Names:
    """What the two versions of cgroups call the same files."""

    limit: str
    swap: str
    events: str


_FIRST = _Names(
    limit="memory.limit_in_bytes",
    swap="memory.memsw.limit_in_bytes",
    events="memory.oom_control",
)
_SECOND = _Names(limit="memory.max", swap="memory.swap.max", events="memory.events")


class MemorySlot:
    """One cgroup, for one cell."""

    def __init__(self, path: Path, names: _Names) -> None:
        self._path = path
        self._names = names
        self._limit = 0
        self._events = os.open(path / names.events, os.O_RDONLY | os.O_CLOEXEC)

    @classmethod
    def make(cls) -> MemorySlot | None:
        """Return a new one below this process's own; None where that is not possible."""
        for parent, names in _parents():
            _sweep(parent)
            path = parent / f"headrace-{os.getpid()}-{next(_NUMBERS)}"
            try:
                path.mkdir()
            except OSError:
                continue
            if os.access(path / names.limit, os.W_OK):
                return cls(path, names)
            path.rmdir()
        return None

    def place(self, process_id: int) -> None:
        """Put a process, and what it will start, into it. Raises OSError."""
        (self._path / "cgroup.procs").write_text(str(process_id))

    def limit(self, num_bytes: int) -> None:
        """Limit the memory of all its processes and of the files they have in memory."""
        if num_bytes == self._limit:
            return
        swap = num_bytes if self._names is _FIRST else 0
        # Memory and swap together may not be less than memory alone: the order depends on which
        # way it goes, so the one that the kernel refuses first is tried again.
        wanted = (
            (self._names.limit, num_bytes),
            (self._names.swap, swap),
            (self._names.limit, num_bytes),
        )
        for name, value in wanted:
            try:
                (self._path / name).write_text(str(value))
            except OSError:
                continue
        self._limit = num_bytes

    def num_kills(self) -> int:
        """Return how many of its processes the kernel has killed for want of memory."""
        for line in os.pread(self._events, _PAGE, 0).decode().splitlines():
            name, _, value = line.partition(" ")
            if name == "oom_kill":
                return int(value)
        return 0

    def remove(self) -> None:
        """Remove it; its processes must have ended. Raises OSError."""
        self._path.rmdir()
        os.close(self._events)


def _sweep(parent: Path) -> None:
    """Remove what a process that was killed could not remove itself."""
    for path in parent.glob("headrace-*-*"):
        owner = path.name.split("-")[1]
        if not Path("/proc", owner).exists():
            # It may still hold a process that is ending; then it is for the next one to remove.
            with contextlib.suppress(OSError):
                path.rmdir()


def _parents() -> Iterator[tuple[Path, _Names]]:
    """Find where a cgroup with a memory limit could be made, by what /proc says of this process."""
    own: dict[str, str] = {}
    for line in _lines("/proc/self/cgroup"):
        _, controllers, place = line.split(":", 2)
        own |= dict.fromkeys(controllers.split(","), place)
    for line in _lines("/proc/self/mountinfo"):
        left, _, right = line.partition(" - ")
        mounted_at = Path(left.split()[4])
        kind, _, options = right.split(" ", 2)
        if kind == "cgroup" and "memory" in options.split(","):
            path = mounted_at / own.get("memory", "/").lstrip("/")
            yield (path if path.is_dir() else mounted_at), _FIRST
        elif kind == "cgroup2":
            path = mounted_at / own.get("", "/").lstrip("/")
            # Beside the own one: one that holds processes gives no controllers to its children.
            if path != mounted_at and "memory" in _words(path.parent / "cgroup.subtree_control"):
                yield path.parent, _SECOND


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def _words(path: Path) -> list[str]:
    return " ".join(_lines(str(path))).split()
