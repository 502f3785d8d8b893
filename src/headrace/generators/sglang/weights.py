"""Published weights as a checkpoint on disk, where the servers read them.

A version's directory is whole before it has its name and is gone once every server has loaded it.
What was written is read back and counted, so what the servers are pointed at is what was published.
The directory around it is locked while its process lives, by which the next run of this machine
tells what a killed one has left and removes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import secrets
import shutil
import socket
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from headrace.errors import CheckpointError, WeightSyncError
from headrace.models.checkpoint import save_tensors
from headrace.models.hf_files import weight_files
from headrace.models.weights import checksum
from headrace.types import WeightUpdate

MEMORY = Path("/dev/shm")  # noqa: S108 - a directory of our own is made in it
"""Files here are memory: on one machine nothing is written to a disk."""
PREFIX = "headrace-weights-"


class PublishedWeights:
    """Checkpoints of one run, in a directory of their own."""

    def __init__(
        self, parent: Path | None, hf_config: Mapping[str, Any], model_directory: Path
    ) -> None:
        """``parent`` must be seen by every server; None takes memory or a temporary directory."""
        self._parent = parent
        self._hf_config = hf_config
        self._model_directory = model_directory
        self._home: Path | None = None
        self._lock: int | None = None

    @property
    def place(self) -> str:
        """Where versions are written, for people."""
        return f"generator.sglang.weights_directory = {self._parent or 'null'}"

    def write(self, update: WeightUpdate, name: str) -> Path:
        """Write ``update`` and return its directory. Raises WeightSyncError."""
        directory = self._own_directory() / name
        partial = directory.with_suffix(".partial")
        try:
            dtype = next(iter(update.tensors.values())).dtype
            save_tensors(update.tensors, partial, self._hf_config, self._model_directory, dtype)
            found = checksum(_tensors(partial))
            if found == update.checksum:
                partial.rename(directory)
                return directory
            reason = f"its files hold checksum {found:x} instead of {update.checksum:x}"
        except (CheckpointError, OSError, SafetensorError) as error:
            reason = str(error)
        shutil.rmtree(partial, ignore_errors=True)
        msg = f"version {update.policy_version} was not written to {directory.parent}: {reason}"
        raise WeightSyncError(msg)

    def remove(self, directory: Path) -> None:
        """Forget a version that every server has loaded."""
        shutil.rmtree(directory, ignore_errors=True)

    def close(self) -> None:
        """Remove all that was written. Idempotent."""
        if self._home is not None:
            shutil.rmtree(self._home, ignore_errors=True)
        self._home = None
        if self._lock is not None:
            os.close(self._lock)
        self._lock = None

    def _own_directory(self) -> Path:
        if self._home is None:
            try:
                self._home = self._new_directory()
            except OSError as error:
                msg = f"{self.place} cannot be used: {error}"
                raise WeightSyncError(msg) from error
        return self._home

    def _new_directory(self) -> Path:
        """Make a directory: where it was asked for as the user's mask says, else for us alone."""
        parent, mode = self._parent, 0o777
        if parent is None:
            parent = MEMORY if MEMORY.is_dir() else Path(tempfile.gettempdir())
            mode = 0o700
        _sweep(parent)
        name = f"{_prefix()}{secrets.token_hex(4)}"
        parent.mkdir(parents=True, exist_ok=True)
        fresh = parent / f".{name}"  # nobody sweeps it before it is locked
        fresh.mkdir(mode=mode)
        self._lock = _locked(fresh)
        return fresh.rename(parent / name)


def _prefix() -> str:
    """Begins with the host: a lock is not seen from every machine that shares a disk."""
    return f"{PREFIX}{socket.gethostname()}-"


def _sweep(parent: Path) -> None:
    """Remove what processes of this host have left that ended before they could."""
    for directory in parent.glob(f"{glob.escape(_prefix())}*"):
        lock = _locked(directory)
        if lock is not None:
            shutil.rmtree(directory, ignore_errors=True)
            os.close(lock)


def _locked(directory: Path) -> int | None:
    """Return what holds ``directory`` while it is open; None if another process does, or none can.

    The kernel lets go of it however the process ends.
    """
    with contextlib.suppress(OSError):
        lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
        else:
            return lock
    return None


def _tensors(directory: Path) -> Iterator[tuple[str, Tensor]]:
    for path in weight_files(directory):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                yield name, file.get_tensor(name)
