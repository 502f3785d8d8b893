"""What the processes of a job use right now, as the kernel tells from outside.

Read only for jobs that take long: what a short one used, its cell says when it is done. A process
that ended between two looks is counted by what its parent has waited for; one whose parent ignored
it is counted as far as it was last seen.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

_TICK = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How large a process is, in bytes."""

    address_space: int
    resident: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What all processes of a job use."""

    cpu_seconds: float
    resident: int
    """Bytes beyond what all share with the process that forks; what some of them share is counted
    once for each only where this user may not look closer."""
    num_processes: int
    """Without those that have ended and wait to be waited for."""


class Watch:
    """Looks at one job: everything below the process that forks.

    That waits for its own child alone, and for all others once that has ended: what the kernel adds
    up for it while a job runs is of jobs before.
    """

    def __init__(self, forker: Callable[[], int], base: Size) -> None:
        """``forker``: which process it is; in a cell another one may take its place."""
        self._forker = forker
        self._base = base
        self._seen: dict[int, float] = {}

    def look(self, enough_bytes: int) -> Usage:
        """Return what is used now.

        Memory is looked at more closely where it seems to be more than ``enough_bytes``: the exact
        number takes the kernel long.
        """
        alive: dict[int, float] = {}
        resident = num_processes = 0
        for pid in descendants(self._forker()):
            with contextlib.suppress(OSError, IndexError, ValueError):
                fields = _stat(pid)
                # utime, stime and those of the children it waited for; resident pages.
                alive[pid] = sum(map(int, fields[11:15])) / _TICK
                num_processes += fields[0] != "Z"
                resident += max(0, int(fields[21]) * _PAGE - self._base.resident)
        gone = sum(used for pid, used in self._seen.items() if pid not in alive)
        self._seen |= alive
        if resident > enough_bytes:
            resident = self._resident_by_share(alive) or resident
        return Usage(
            cpu_seconds=sum(alive.values()) + gone,
            resident=resident,
            num_processes=num_processes,
        )

    def _resident_by_share(self, pids: Iterable[int]) -> int | None:
        """Return the bytes of these processes, a page of several shared out among them.

        None where one of them may not be looked into. What they share with the process that forks
        is at most its own.
        """
        shares = 0
        for pid in pids:
            try:
                lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            except (FileNotFoundError, ProcessLookupError):
                continue  # it has ended since
            except PermissionError:
                return None
            kib = [int(line.split()[1]) for line in lines if line.startswith("Pss:")]
            shares += sum(kib) << 10
        return max(0, shares - self._base.resident)


def size_of(pid: int) -> Size:
    """Return how large a process is. Raises OSError once it has ended."""
    pages = [int(word) for word in Path(f"/proc/{pid}/statm").read_text().split()]
    return Size(address_space=pages[0] * _PAGE, resident=pages[1] * _PAGE)


def descendants(pid: int) -> Iterator[int]:
    """Yield the processes below ``pid``."""
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                for child in (task / "children").read_text().split():
                    yield int(child)
                    yield from descendants(int(child))


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the name, which may hold anything; see proc(5)."""
    return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
