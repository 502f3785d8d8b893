"""The one place where a program may write, empty at its start whatever ran before.

Owns: nothing of one job is left for the next. `TmpfsBox` mounts a new file system for each, so its
size and number of files are limited too; `FolderBox`, where mounting is not possible, makes a new
folder on the host's disk and removes the last one, however it was left.
"""

from __future__ import annotations

import os
from typing import Protocol

from headrace.verifiers.sandbox.inside import kernel
from headrace.verifiers.sandbox.inside.removal import empty

_MAX_FILES = 4096


class Box(Protocol):
    """A working directory for each job."""

    def renew(self, disk_bytes: int, *, may_execute: bool) -> str:
        """Throw away what is there and return the path of an empty directory. Raises OSError."""
        ...


class TmpfsBox:
    """A file system in memory, mounted anew for every job."""

    def __init__(self, path: str, user: int) -> None:
        self._path = path
        self._user = user
        self._mounted = False

    def renew(self, disk_bytes: int, *, may_execute: bool) -> str:
        """Mount an empty file system; with the old one goes all that was in it."""
        if self._mounted:
            kernel.unmount(self._path)
        options = (
            f"size={disk_bytes},nr_inodes={_MAX_FILES},mode=700,uid={self._user},gid={self._user}"
        )
        flags = kernel.MS_NOSUID | kernel.MS_NODEV | (0 if may_execute else kernel.MS_NOEXEC)
        kernel.mount("box", self._path, "tmpfs", flags, options)
        self._mounted = True
        return self._path


class FolderBox:
    """A new folder for every job, on whatever disk ``parent`` is on."""

    def __init__(self, parent: str, user: int) -> None:
        self._parent = parent
        self._user = user
        self._count = 0

    def renew(self, disk_bytes: int, *, may_execute: bool) -> str:
        """Remove the last folder and make another."""
        del disk_bytes, may_execute
        empty(self._parent)
        self._count += 1
        path = f"{self._parent}/{self._count}"
        os.mkdir(path, 0o700)  # noqa: PTH102 - text, as all paths here
        if os.getuid() != self._user:
            os.chown(path, self._user, self._user)
        return path
