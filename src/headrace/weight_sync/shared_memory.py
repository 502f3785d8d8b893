"""Blocks in shared memory of one machine: written once, read where they lie, never left behind.

A segment is a file without a name in a directory of memory. It counts against the size of that
directory, so that a full one is an error and no killed process; it is opened through ``/proc`` of
the process that wrote it, so that a run which has ended can be mistaken for no other; and it is
gone with the last process that holds it, however that process ends: there is nothing to sweep.

Owns: no segment is written while it is read. Readers hold a shared lock on it and the writer takes
the exclusive one. The kernel lets a lock go with its process, so a killed reader holds nothing and
a killed writer leaves a segment that is no block.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from torch import Tensor

from headrace.errors import WeightSyncError
from headrace.host import available_memory
from headrace.models.weight_layout import WeightLayout
from headrace.types import WeightPart
from headrace.weight_sync.blocks import (
    Block,
    BlockHeader,
    block_bytes,
    data_start,
    erase_header,
    put_into,
    read_block,
    write_header,
)

DIRECTORY = Path("/dev/shm")  # noqa: S108 - nothing there gets a name
"""Where Linux has memory as files."""
MAX_READ = 2
"""Segments that hold old versions and are still read: more of them are not made."""
MAX_MAPPED = 2
"""Segments that a reader keeps mapped: those that take turns."""
LARGEST_WASTE = 2
"""Times what is needed that a segment may have to be used again."""
LOCK_SECONDS = 60.0
"""Longest wait for a reader to let go when there are so many."""
_POLL_SECONDS = 0.005


class Segment:
    """One file of memory, mapped by the process that writes it."""

    def __init__(self, directory: Path, num_bytes: int) -> None:
        """Raise WeightSyncError where there is no room for ``num_bytes``."""
        try:
            self._file: BinaryIO = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115 - held
        except OSError as error:
            raise _unusable(directory, error) from error
        try:
            _check_room(directory, num_bytes)
            # Taken now, not when it is written to: what is missing then is a signal, not an error.
            os.posix_fallocate(self._file.fileno(), 0, num_bytes)
            self.memory = mmap.mmap(self._file.fileno(), num_bytes)
        except OSError as error:
            self._file.close()
            raise _full(directory, num_bytes) from error
        except BaseException:
            self._file.close()
            raise

    @property
    def place(self) -> str:
        """Where other processes of this user open it."""
        return f"/proc/{os.getpid()}/fd/{self._file.fileno()}"

    def try_to_lock(self) -> bool:
        """Take the exclusive lock, unless somebody reads."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def unlock(self) -> None:
        """Let readers in."""
        fcntl.flock(self._file, fcntl.LOCK_UN)

    def close(self) -> None:
        """Give it back; readers that have it mapped keep it until they are done."""
        self._file.close()


@dataclass(slots=True, kw_only=True, eq=False)
class SharedMemoryCarrier:
    """Writes blocks for processes of this machine. Not for several threads at once.

    Memory that was paid for is written again: a fresh page costs several times what writing to it
    does. So segments that were dropped are kept for the next block that fits.
    """

    directory: Path = DIRECTORY
    lock_seconds: float = LOCK_SECONDS
    _used: dict[str, Segment] = field(default_factory=dict)
    """By place: what was put and not dropped."""
    _free: list[Segment] = field(default_factory=list)
    """What was dropped; readers may still hold some of it."""

    def room(self, layout: WeightLayout) -> SegmentRoom:
        """See `RoomCarrier`."""
        segment = self._segment(block_bytes(layout))
        erase_header(segment.memory)
        views = layout.views(segment.memory, data_start(layout))
        return SegmentRoom(carrier=self, segment=segment, layout=layout, tensors=views)

    def put(self, header: BlockHeader, tensors: Mapping[str, Tensor]) -> WeightPart:
        """See `Carrier`."""
        return put_into(self.room(header.layout), header, tensors)

    def use(self, segment: Segment) -> None:
        """Let readers at a segment that was written."""
        segment.unlock()
        self._used[segment.place] = segment

    def give_back(self, segment: Segment) -> None:
        """Take a segment back unread."""
        segment.unlock()
        self._free.append(segment)

    def drop(self, part: WeightPart) -> None:
        """See `Carrier`."""
        segment = self._used.pop(part.place, None)
        if segment is not None:
            self._free.append(segment)

    def close(self) -> None:
        """See `Carrier`."""
        for segment in (*self._used.values(), *self._free):
            segment.close()
        self._used, self._free = {}, []

    def _segment(self, num_bytes: int) -> Segment:
        """Return a locked segment of at least ``num_bytes``; what is free beside it goes.

        Waits for a reader to let go where `MAX_READ` are read that nobody is told of any more;
        unblocked by the reader, by its death, or by the deadline.
        """
        deadline = time.monotonic() + self.lock_seconds
        while True:
            idle = [segment for segment in self._free if segment.try_to_lock()]
            self._free = [segment for segment in self._free if segment not in idle]
            fitting = [s for s in idle if num_bytes <= len(s.memory) <= LARGEST_WASTE * num_bytes]
            for segment in idle:
                if segment not in fitting[:1]:
                    segment.close()
            if fitting:
                return fitting[0]
            if len(self._free) < MAX_READ:
                if not self._used and not self._free:
                    _check_two(self.directory, num_bytes)
                segment = Segment(self.directory, num_bytes)
                assert segment.try_to_lock(), "nobody else knows it yet"
                return segment
            if time.monotonic() > deadline:
                msg = (
                    f"{len(self._free)} versions in {self.directory} are still read "
                    f"{self.lock_seconds:.0f} s after later ones were published, so there is no "
                    "memory to write the next one to: a generator hangs while it loads weights; "
                    "end it and publish again"
                )
                raise WeightSyncError(msg)
            time.sleep(_POLL_SECONDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentRoom:
    """A segment that is locked for writing: a `Room`."""

    carrier: SharedMemoryCarrier
    segment: Segment
    layout: WeightLayout
    tensors: Mapping[str, Tensor]

    def commit(self, header: BlockHeader) -> WeightPart:
        """See `Room`."""
        assert header.layout == self.layout, "the room was made for other tensors"
        write_header(self.segment.memory, header)
        self.carrier.use(self.segment)
        return header.part(self.segment.place)

    def give_back(self) -> None:
        """See `Room`."""
        self.carrier.give_back(self.segment)


@dataclass(slots=True, kw_only=True, eq=False)
class SharedMemoryFetcher:
    """Opens blocks of processes of this machine. Not for several threads at once.

    The segments that take turns stay mapped: to map one again costs a fault for every few pages.
    So a writer that has ended leaves `MAX_MAPPED` of them here until others take their place.
    """

    _mapped: dict[tuple[int, int], mmap.mmap] = field(default_factory=dict)
    """By device and number of the file, which no other gets while it is mapped; last used last."""

    def __reduce__(self) -> tuple[object, ...]:
        """What is mapped stays where it is."""
        return SharedMemoryFetcher, ()

    @contextmanager
    def fetch(self, part: WeightPart) -> Iterator[Block]:
        """See `Fetcher`: tensors lie in the segment; writing to one changes a page of one's own."""
        with _read_locked(part) as file:
            found = os.fstat(file.fileno())
            key = found.st_dev, found.st_ino
            memory = self._mapped.pop(key, None) or _mapped(file, found.st_size)
            yield read_block(memory, part)
            # Only where all went well: a page that was written to would hide what comes next.
            self._mapped[key] = memory
            for old in list(self._mapped)[:-MAX_MAPPED]:
                del self._mapped[old]

    def close(self) -> None:
        """See `Fetcher`."""
        self._mapped.clear()


def _mapped(file: BinaryIO, size: int) -> mmap.mmap:
    writable = mmap.PROT_READ | mmap.PROT_WRITE  # torch reads no memory that it may not write
    return mmap.mmap(file.fileno(), size, flags=mmap.MAP_PRIVATE, prot=writable)


@contextmanager
def _read_locked(part: WeightPart) -> Iterator[BinaryIO]:
    """Open a segment and keep it from being written until the context ends.

    The lock is let go here: a mapping has a descriptor of its own, which would hold it on.
    """
    with _opened(part) as file:
        try:
            yield file
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)


def _opened(part: WeightPart) -> BinaryIO:
    """Open a segment and lock it against being written."""
    try:
        file = Path(part.place).open("rb")  # noqa: SIM115 - closed by whoever asked
    except OSError as error:
        msg = (
            f"version {part.policy_version} is gone: {part.place} cannot be opened "
            f"({error.strerror}); the process that published it has ended, gave it up, or runs as "
            'another user or on another machine, for which weight_sync.transport = "files" is'
        )
        raise WeightSyncError(msg) from None
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        msg = f"version {part.policy_version} is gone: {part.place} is being written over"
        raise WeightSyncError(msg) from None
    return file


def _check_room(directory: Path, num_bytes: int) -> None:
    """Raise WeightSyncError where memory itself would run out, which no allocation reports."""
    available = available_memory()
    if available is not None and available < num_bytes:
        msg = (
            f"{directory}: a published version takes {num_bytes} bytes and the machine has "
            f"{available} bytes of memory left; train with less memory, or publish by "
            'weight_sync.transport = "files"'
        )
        raise WeightSyncError(msg)


def _check_two(directory: Path, num_bytes: int) -> None:
    """Raise WeightSyncError before the first version where there is no room for the second.

    The one is written while the other may still be read, so a run without it would end at its first
    step.
    """
    try:
        found = os.statvfs(directory)
    except OSError as error:
        raise _unusable(directory, error) from error
    if found.f_bavail * found.f_frsize < 2 * num_bytes:
        raise _full(directory, num_bytes)


def _full(directory: Path, num_bytes: int) -> WeightSyncError:
    found = os.statvfs(directory)
    total, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    msg = (
        f"{directory} is full: two published versions, which take turns, take {num_bytes} bytes "
        f"each and {free} of its {total} are free; make it larger (docker run --shm-size, mount -o "
        'remount,size=...), end what else uses it, or set weight_sync.transport = "files"'
    )
    return WeightSyncError(msg)


def _unusable(directory: Path, error: OSError) -> WeightSyncError:
    msg = (
        f"{directory} cannot hold published weights: {error.strerror}; it must be a directory of "
        'memory that this user may write, or set weight_sync.transport = "files"'
    )
    return WeightSyncError(msg)
