"""The one place where a program may write, empty at its start whatever ran before.

Owns: nothing of one job is left for the next. `TmpfsBox` mounts a new file system for each job
whose predecessor has touched it, so its size and number of files are limited too; `FolderBox`,
where mounting is not possible, makes a new folder on the host's disk and removes the last one,
however it was left.
"""

from __future__ import annotations

import fcntl
import os
import struct
from dataclasses import dataclass
from typing import Protocol

from headrace.verifiers.sandbox.inside import kernel, protocol
from headrace.verifiers.sandbox.inside.removal import empty

_LOCK = struct.Struct("@hhqqi")
"""struct flock: type, from where, start, length, process."""


@dataclass(frozen=True)
class Place:
    """An empty directory."""

    path: str
    number: int
    """Another one for every other directory, also for one at the same path."""


class Box(Protocol):
    """A working directory for each job."""

    def renew(self, disk_bytes: int, *, may_execute: bool) -> Place:
        """Return an empty directory, in which nothing is left of what was there. Raises OSError."""
        ...

    def is_untouched(self) -> bool:
        """Whether it is known that nobody touched the directory since."""
        ...


class TmpfsBox:
    """A file system in memory, mounted anew unless it is as it was mounted."""

    def __init__(self, path: str, user: int) -> None:
        self._path = path
        self._user = user
        # Who owns a directory can set its times back, and so hide that something was there.
        self._may_tell = user != os.geteuid()
        self._count = 0
        self._mounted = ("", 0)
        self._state: tuple[int, ...] = ()

    def renew(self, disk_bytes: int, *, may_execute: bool) -> Place:
        """Keep what no program has touched; else mount another: with the old one goes all of it."""
        owner = os.geteuid() if self._may_tell else self._user
        mode = 777 if self._may_tell else 700
        options = (
            f"size={disk_bytes},nr_inodes={protocol.MAX_FILES},mode={mode},uid={owner},gid={owner}"
        )
        # Reading leaves no time behind, so that two programs find the same.
        flags = kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOATIME
        flags |= 0 if may_execute else kernel.MS_NOEXEC
        if self._mounted != (options, flags) or not self.is_untouched():
            self._mount(options, flags)
        return Place(self._path, self._count)

    def is_untouched(self) -> bool:
        """Whether it is as it was mounted, all over."""
        return self._may_tell and _state_of(self._path) == self._state

    def _mount(self, options: str, flags: int) -> None:
        if self._count:
            kernel.unmount(self._path)
        kernel.mount("box", self._path, "tmpfs", flags, options)
        self._count += 1
        self._mounted = (options, flags)
        if self._may_tell:
            # A time that no change of what is in it can leave.
            os.utime(self._path, (0, 0))
            self._state = _state_of(self._path)


def _state_of(path: str) -> tuple[int, ...]:
    """Return all that a program can change of an empty directory and what it is the root of.

    Its time tells of every name that ever was in it; only its owner could set it back. The room
    that is left tells of files without a name, which a socket in flight may hold, and the locks of
    what such a socket may hold too. A program can set no attribute, mode or owner.
    """
    place = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        found, room = os.fstat(place), os.fstatvfs(place)
        return (
            found.st_mtime_ns,
            found.st_atime_ns,
            found.st_nlink,
            found.st_mode,
            room.f_bfree,
            room.f_ffree,
            *_locks_of(place),
        )
    finally:
        os.close(place)


def _locks_of(place: int) -> tuple[int, ...]:
    """Return whether a file is locked, in the two ways in which an open file can hold a lock."""
    asked = _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    kind, *_ = _LOCK.unpack(fcntl.fcntl(place, fcntl.F_OFD_GETLK, asked))
    try:
        fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return kind, 1
    return kind, 0


class FolderBox:
    """A new folder for every job, on whatever disk ``parent`` is on."""

    def __init__(self, parent: str, user: int) -> None:
        self._parent = parent
        self._user = user
        self._count = 0

    def renew(self, disk_bytes: int, *, may_execute: bool) -> Place:
        """Remove the last folder and make another."""
        del disk_bytes, may_execute
        empty(self._parent)
        self._count += 1
        path = f"{self._parent}/{self._count}"
        os.mkdir(path, 0o700)  # noqa: PTH102 - text, as all paths here
        if os.getuid() != self._user:
            os.chown(path, self._user, self._user)
        return Place(path, self._count)

    def is_untouched(self) -> bool:
        """It is not known."""
        return False
