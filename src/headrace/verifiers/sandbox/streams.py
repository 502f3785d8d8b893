"""The files of one job: its payload and input as memory, its outputs as pipes that are read here.

Owns: no more is read than a job may write, and every descriptor is closed at the end. What is read
is the program's word, and is only kept.
"""

from __future__ import annotations

import os
import select
import socket
import time
from types import TracebackType
from typing import Self

from headrace.verifiers.sandbox.inside import protocol
from headrace.verifiers.sandbox.inside.protocol import Terms

_CHUNK = 1 << 16
_NUM_OUTPUTS = 3
_LOOK_SECONDS = 0.02
"""Between two looks at whether the pipes have ended."""


class Streams:
    """Use it in a ``with`` block, for one job."""

    def __init__(self, payload: bytes, stdin: bytes, output_bytes: int) -> None:
        self._payload = payload
        self._stdin = stdin
        self._most = output_bytes
        self._inside: list[int] = []
        self._readers: list[int] = []
        self._content = [bytearray() for _ in range(_NUM_OUTPUTS)]
        self._open: set[int] = set()
        self.overflowed = False

    def __enter__(self) -> Self:
        try:
            self._inside.append(_memory_file(self._stdin))
            for _ in range(_NUM_OUTPUTS):
                reader, writer = os.pipe()
                self._readers.append(reader)
                self._inside.append(writer)
                os.set_blocking(reader, False)
            # In the order that `protocol.NUM_DESCRIPTORS` tells.
            self._inside.insert(-1, _memory_file(self._payload))
        except OSError:
            self._close()
            raise
        self._open = set(self._readers)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close()

    @property
    def stdout(self) -> bytes:
        """What was written to standard output, cut where it may not be longer."""
        return bytes(self._content[0][: self._most])

    @property
    def stderr(self) -> bytes:
        """What was written to standard error, cut where it may not be longer."""
        return bytes(self._content[1][: self._most])

    @property
    def value(self) -> bytes | None:
        """What was returned; None unless something was."""
        result = self._content[2]
        return bytes(result[1:]) if result[:1] == protocol.RESULT_VALUE else None

    @property
    def says_memory_error(self) -> bool:
        """Whether the program was ended by a MemoryError, in its own word."""
        return self._content[2] == protocol.RESULT_MEMORY_ERROR

    def send(self, control: socket.socket, terms: Terms) -> None:
        """Send a job with its files, which are the cell's alone from then on. Raises OSError."""
        socket.send_fds(control, [terms.pack()], self._inside)
        while self._inside:
            os.close(self._inside.pop())

    def register(self, poll: select.poll) -> None:
        """Have ``poll`` report what can be read."""
        for reader in self._readers:
            poll.register(reader, select.POLLIN)

    def read(self, descriptor: int) -> bool:
        """Read what is there; False once there will be no more."""
        content = self._content[self._readers.index(descriptor)]
        try:
            chunk = os.read(descriptor, _CHUNK)
        except BlockingIOError:
            return True
        if not chunk:
            self._open.discard(descriptor)
            return False
        content += chunk
        # A result has one byte before what counts.
        self.overflowed = self.overflowed or len(content) > self._most + 1
        return True

    def drain(self, seconds: float) -> bool:
        """Read to the end, now that all who could write are dead; False if there is no end."""
        deadline = time.monotonic() + seconds
        while self._open and not self.overflowed:
            for reader in list(self._open):
                # What there is, and then mostly the end.
                if self.read(reader):
                    self.read(reader)
            # A pipe that is neither readable nor at its end is held by a process just starting, or
            # was sent through a socket that holds itself and is no process's any more.
            if time.monotonic() >= deadline:
                return False
            if self._open and not select.select(list(self._open), [], [], _LOOK_SECONDS)[0]:
                _collect_sockets()
        return True

    def _close(self) -> None:
        for descriptor in (*self._inside, *self._readers):
            os.close(descriptor)
        self._inside.clear()
        self._readers.clear()


def _collect_sockets() -> None:
    """Have the kernel look for Unix sockets that nobody can reach: it does when one is closed."""
    for end in socket.socketpair():
        end.close()


def _memory_file(content: bytes) -> int:
    descriptor = os.memfd_create("job", os.MFD_CLOEXEC)
    try:
        left = memoryview(content)
        while left:
            left = left[os.write(descriptor, left) :]
        os.lseek(descriptor, 0, os.SEEK_SET)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
