"""Blocks as files of a directory that several machines see under one name.

Owns: a file appears under its name whole or not at all; each process that writes has a folder of
its own there, so that none is mistaken for another's; and what processes of this machine left that
are dead is removed before the first one is written. They are told by the lock that a living one
holds on its folder, which the kernel lets go with its process.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import mmap
import os
import platform
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from headrace.errors import WeightSyncError
from headrace.types import WeightPart
from headrace.weight_sync.blocks import (
    Block,
    BlockHeader,
    block_bytes,
    data_start,
    read_block,
    write_header,
)

PATIENCE_SECONDS = 30.0
"""Until a file that another machine has written shows here: network file systems keep what they
know of a directory for some seconds."""
_POLL_SECONDS = 0.05
_PREFIX = "headrace-weights-"
_LOCK = "owner"
_SUFFIX = ".weights"
_UNFINISHED = ".unfinished"


@dataclass(slots=True, kw_only=True, eq=False)
class FileCarrier:
    """Writes blocks into a folder of its own in ``directory``."""

    directory: Path
    """Absolute: readers are told of files in it."""
    _folder: _OwnFolder | None = None
    _held: set[str] = field(default_factory=set)
    _num_written: int = 0

    @torch.no_grad()
    def put(self, header: BlockHeader, tensors: Mapping[str, Tensor]) -> WeightPart:
        """See `Carrier`."""
        size = block_bytes(header.layout)
        kind = "whole" if header.base is None else f"since-{header.base[0]}"
        try:
            if self._folder is None:
                self._folder = _OwnFolder(self.directory)
            folder = self._folder.path
            # Numbered: a version that is written again after a learner's restart is another file,
            # and goes and stays by itself.
            self._num_written += 1
            name = f"{self._num_written}-{header.policy_version}-{header.checksum:x}-{kind}"
            path = folder / f"{name}{_SUFFIX}"
            unfinished = path.with_suffix(_UNFINISHED)
            try:
                _write(unfinished, header, tensors)
                unfinished.replace(path)
            finally:
                unfinished.unlink(missing_ok=True)
            _sync(folder)
        except OSError as error:
            raise _failure(self.directory, size, error) from None
        self._held.add(str(path))
        return header.part(str(path))

    def drop(self, part: WeightPart) -> None:
        """See `Carrier`. Who has the file open keeps what is in it."""
        if part.place in self._held:
            self._held.remove(part.place)
            Path(part.place).unlink(missing_ok=True)

    def close(self) -> None:
        """See `Carrier`."""
        if self._folder is not None:
            self._folder.remove()
        self._folder, self._held = None, set()


class _OwnFolder:
    """A folder of this process's in a shared directory, for as long as it holds the lock in it."""

    def __init__(self, directory: Path) -> None:
        """Make it, after removing those of processes of this machine that ended. Raises OSError."""
        directory.mkdir(parents=True, exist_ok=True)
        prefix = f"{_PREFIX}{platform.node()}-"
        for other in directory.glob(f"{glob.escape(prefix)}*"):
            if _is_left(other):
                shutil.rmtree(other, ignore_errors=True)
        name = f"{prefix}{secrets.token_hex(8)}"
        unfinished = directory / f".{name}"
        unfinished.mkdir()
        self._lock: BinaryIO = (unfinished / _LOCK).open("wb")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            # Under its name only now, locked: nobody takes it for one that was left.
            self.path = unfinished.rename(directory / name)
        except OSError:
            self._lock.close()
            raise

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def _is_left(folder: Path) -> bool:
    """Return whether the process that made ``folder`` has ended."""
    try:
        with (folder / _LOCK).open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # somebody holds it, is removing it, or it is another user's
        return False
    return True


@dataclass(slots=True, kw_only=True, eq=False)
class FileFetcher:
    """Opens blocks that are files."""

    patience_seconds: float = PATIENCE_SECONDS

    @contextmanager
    def fetch(self, part: WeightPart) -> Iterator[Block]:
        """See `Fetcher`: tensors lie in the file's pages; writing to one changes one's own.

        Waits for the file to show; unblocked by the file system, or by the deadline.
        """
        deadline = time.monotonic() + self.patience_seconds
        while (memory := _mapped(part)) is None:
            if time.monotonic() > deadline:
                msg = (
                    f"version {part.policy_version} is gone: there is no {part.place} after "
                    f"{self.patience_seconds:g} s; weight_sync.directory must be one that every "
                    "machine sees under this name, or a later version has taken its place"
                )
                raise WeightSyncError(msg)
            time.sleep(_POLL_SECONDS)
        yield read_block(memory, part)

    def close(self) -> None:
        """See `Fetcher`. Nothing is kept."""


def _mapped(part: WeightPart) -> mmap.mmap | None:
    """Return the file's pages; None where there is none, or not all of it shows yet."""
    try:
        with Path(part.place).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < part.num_bytes:
                return None
            writable = mmap.PROT_READ | mmap.PROT_WRITE
            return mmap.mmap(file.fileno(), size, flags=mmap.MAP_PRIVATE, prot=writable)
    except FileNotFoundError:
        return None
    except OSError as error:
        msg = f"{part.place} cannot be read: {error.strerror}"
        raise WeightSyncError(msg) from None


def _write(path: Path, header: BlockHeader, tensors: Mapping[str, Tensor]) -> None:
    """Write a block and have it on the disk. Raises OSError."""
    head = bytearray(data_start(header.layout))
    write_header(head, header)
    with path.open("wb") as file:
        file.write(head)
        for place in (place for place in header.layout.places if 0 not in place.shape):
            file.seek(len(head) + place.offset)
            flat = tensors[place.name].detach().cpu().contiguous().view(-1)
            file.write(flat.view(torch.uint8).numpy().data)
        file.truncate(block_bytes(header.layout))
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _failure(directory: Path, size: int, error: OSError) -> WeightSyncError:
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        found = os.statvfs(directory)
        msg = (
            f"{directory} is full: a published version takes {size} bytes and "
            f"{found.f_bavail * found.f_frsize} are free; make room there, or set "
            "weight_sync.directory"
        )
    else:
        msg = (
            f"{directory} cannot hold published weights: {error.strerror}; weight_sync.directory "
            "must be one that this user may write"
        )
    return WeightSyncError(msg)
