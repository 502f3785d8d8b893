"""What passes between the supervisor outside and the process that forks inside.

One message a datagram, of a fixed form, on a socket that no program ever holds. A job's own content
travels in a file that only the job's process reads, so the process that forks never has it in its
memory, and one job finds nothing of another in what it inherits.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

MAX_MESSAGE = 1 << 16
NUM_DESCRIPTORS = 5
"""With each job: 0, 1 and 2 of the program, then its payload, then where its result goes. The
kernel gives them the lowest numbers that are free, and these are: so they need not be moved."""

MAX_FILES = 4096
"""In a job's directory."""

READY, FAILED, DONE = b"R", b"E", b"D"
"""First byte of what comes from inside; after FAILED, the reason as text."""

RESULT_VALUE, RESULT_MEMORY_ERROR = b"V", b"M"
"""First byte of a result: an encoding (or a compiled file) follows; memory had run out."""

_TERMS = struct.Struct("<dQQQQQ??")
_DONE = struct.Struct("<id?")


@dataclass(frozen=True)
class Terms:
    """What the process that forks must know of a job. Nothing of its content."""

    cpu_seconds: float
    address_space: int
    """Bytes of one process; 0 leaves it to the memory that is counted from outside."""
    data_bytes: int
    """Private memory of one process that it may write to."""
    file_bytes: int
    """Of one file."""
    disk_bytes: int
    num_processes: int
    may_execute: bool
    """Whether it may run other programs; Python needs none."""
    may_execute_own: bool
    """Also those in its own directory: what was compiled."""

    def pack(self) -> bytes:
        """Return the message."""
        return _TERMS.pack(
            self.cpu_seconds,
            self.address_space,
            self.data_bytes,
            self.file_bytes,
            self.disk_bytes,
            self.num_processes,
            self.may_execute,
            self.may_execute_own,
        )

    @classmethod
    def unpack(cls, message: bytes) -> Terms:
        """Return what `pack` was given."""
        return cls(*_TERMS.unpack(message))


@dataclass(frozen=True)
class Done:
    """How a job's first process ended, in the kernel's words, and what all of them used."""

    wait_status: int
    """As of waitpid."""
    cpu_seconds: float
    """Of every process of the job that was waited for."""
    bad_call: bool
    """Whether a process that was left over had died of a forbidden call."""

    def pack(self) -> bytes:
        """Return the message."""
        return DONE + _DONE.pack(self.wait_status, self.cpu_seconds, self.bad_call)

    @classmethod
    def unpack(cls, message: bytes) -> Done:
        """Return what `pack` was given. Raises ValueError for anything else."""
        if message[:1] != DONE or len(message) != 1 + _DONE.size:
            msg = "not the message that a job is done"
            raise ValueError(msg)
        return cls(*_DONE.unpack(message[1:]))
