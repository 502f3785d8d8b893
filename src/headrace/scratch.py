"""Folders that last as long as the process that made them.

Owns: what a killed process left behind is removed by the next one that makes a folder of the same
kind, and a folder that is in use never is. The lock that tells them apart is the kernel's: it ends
with its process, however that ends, and is seen from other containers too.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self


class ScratchFolder:
    """One folder below the system's folder for temporary files."""

    def __init__(self, kind: str) -> None:
        """Make ``headrace-KIND-*``, empty, for this user alone. Raises OSError."""
        prefix = f"headrace-{kind}-"
        for leftover in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
            _remove_if_unused(leftover)
        self._lock: int | None = None
        while self._lock is None:
            self.path = Path(tempfile.mkdtemp(prefix=prefix))
            # None where somebody who sweeps took it for a leftover, before it was locked.
            self._lock = _locked(self.path)

    def remove(self) -> None:
        """Delete it and all that is in it. Idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self.remove()


def _locked(folder: Path) -> int | None:
    """Return what holds the lock on ``folder``; None where another one does, or where it is gone.

    Raises OSError.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if folder.exists():
            return descriptor
    except BlockingIOError:
        pass
    os.close(descriptor)
    return None


def _remove_if_unused(folder: Path) -> None:
    # What is another user's, or was no folder, is left to whoever made it.
    with contextlib.suppress(OSError):
        lock = _locked(folder)
        if lock is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)
