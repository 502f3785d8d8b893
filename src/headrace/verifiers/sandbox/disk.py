"""What the files of a job take on the host's disk, where no file system of its own bounds them.

Looked at while a job runs, so a program can write more in between two looks, and no more. Files
without a name are found where this user may look at who has them open.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterable
from pathlib import Path

from headrace.verifiers.sandbox.inside.protocol import MAX_FILES

_BLOCK = 512
"""Of st_blocks, whatever the file system's own are."""


def exceeds(folder: str, most_bytes: int, pids: Iterable[int]) -> bool:
    """Whether the files below ``folder``, and those ``pids`` hold open, are more than they may be.

    That is more bytes, more than `MAX_FILES`, or paths that are longer than the kernel takes.
    """
    count = used = 0
    folders = [folder]
    while folders and count <= MAX_FILES and used <= most_bytes:
        try:
            entries = list(os.scandir(folders.pop()))
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                return True
            continue  # it is gone, or its own program cannot look into it either
        for entry in entries:
            # It may be gone.
            with contextlib.suppress(FileNotFoundError):
                found = entry.stat(follow_symlinks=False)
                count += 1
                if stat.S_ISDIR(found.st_mode):
                    folders.append(entry.path)
                else:
                    used += _bytes_of(found)
    used += _bytes_without_name(Path(folder).stat().st_dev, pids)
    return count > MAX_FILES or used > most_bytes


def _bytes_without_name(device: int, pids: Iterable[int]) -> int:
    sizes: dict[int, int] = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            for entry in os.scandir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    found = entry.stat()
                    if found.st_dev == device and found.st_nlink == 0:
                        sizes[found.st_ino] = _bytes_of(found)
    return sum(sizes.values())


def _bytes_of(file: os.stat_result) -> int:
    """Return what a program has written: no hole, and not what the file system adds of its own."""
    return min(file.st_size, file.st_blocks * _BLOCK)
