"""Published weights as a checkpoint on disk, where the servers read them.

A version's directory is whole before it has its name and is gone once every server has loaded it.
What was written is read back and counted, so what the servers are pointed at is what was published.
"""

from __future__ import annotations

import secrets
import shutil
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

    def _own_directory(self) -> Path:
        if self._home is None:
            try:
                self._home = self._new_directory()
            except OSError as error:
                where = self._parent or "null"
                msg = f"generator.sglang.weights_directory = {where} cannot be used: {error}"
                raise WeightSyncError(msg) from error
        return self._home

    def _new_directory(self) -> Path:
        """Make a directory: where it was asked for as the user's mask says, else for us alone."""
        if self._parent is None:
            parent = MEMORY if MEMORY.is_dir() else None
            return Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        directory = self._parent / f"{PREFIX}{secrets.token_hex(4)}"
        directory.mkdir(parents=True)
        return directory


def _tensors(directory: Path) -> Iterator[tuple[str, Tensor]]:
    for path in weight_files(directory):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                yield name, file.get_tensor(name)
