"""What transports over the network share: messages of one line of JSON, blocks as bytes, places.

Trusts the network: what is sent is not encrypted, and who knows the token of a block may read it.
"""

from __future__ import annotations

import json
import mmap
import socket
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from threading import Thread
from typing import Any

from headrace.errors import WeightSyncError
from headrace.types import WeightPart

LONGEST = 4096
"""Bytes of a message."""
_CHUNK = 1 << 20

Message = Mapping[str, Any]
Address = tuple[str, int]


class WireError(Exception):
    """The other side is gone, late, or speaks another language."""


def where_from(part: WeightPart, scheme: str, what: str) -> tuple[Address, str]:
    """Return whom to ask for ``part``, and its token.

    Raises WeightSyncError where its place is none of ``scheme``, that is, no ``what``.
    """
    address, _, token = part.place.removeprefix(scheme).rpartition("/")
    host, _, port = address.rpartition(":")
    if not (part.place.startswith(scheme) and host and port.isdigit() and token):
        msg = f"{part.place} is no {what}"
        raise WeightSyncError(msg)
    return (host, int(port)), token


@dataclass(slots=True)
class Line:
    """One connection, used by one thread."""

    connection: socket.socket

    @classmethod
    def to(cls, address: Address, seconds: float) -> Line:
        """Connect; every wait on the line ends after ``seconds``. Raises WireError."""
        try:
            connection = socket.create_connection(address, timeout=seconds)
        except OSError as error:
            msg = f"{address[0]}:{address[1]} cannot be reached: {error}"
            raise WireError(msg) from None
        connection.settimeout(seconds)
        return cls(connection)

    def say(self, **message: object) -> None:
        """Send one message. Raises WireError."""
        self.send(json.dumps(message).encode() + b"\n")

    def hear(self) -> Message:
        """Return the next message. Raises WireError."""
        text = b""
        while not text.endswith(b"\n"):
            text += self._received(1)
            if len(text) > LONGEST:
                raise WireError("a message without an end")  # noqa: EM101, TRY003 - for a log
        try:
            message = json.loads(text)
        except ValueError:
            message = None
        if not isinstance(message, dict):
            raise WireError("no message")  # noqa: EM101, TRY003 - for a log
        return message

    def send(self, data: bytes | memoryview | mmap.mmap) -> None:
        """Send ``data``. Raises WireError."""
        try:
            self.connection.sendall(data)
        except OSError as error:
            raise WireError(str(error)) from None

    def receive(self, memory: mmap.mmap) -> None:
        """Fill ``memory``. Raises WireError."""
        view, at = memoryview(memory), 0
        while at < len(view):
            try:
                count = self.connection.recv_into(view[at : at + _CHUNK])
            except OSError as error:
                raise WireError(str(error)) from None
            if not count:
                msg = f"the connection ended after {at} of {len(view)} bytes"
                raise WireError(msg)
            at += count

    def close(self) -> None:
        """End the connection."""
        self.connection.close()

    def _received(self, count: int) -> bytes:
        try:
            data = self.connection.recv(count)
        except OSError as error:
            raise WireError(str(error)) from None
        if not data:
            raise WireError("the connection ended")  # noqa: EM101, TRY003 - for a log
        return data


class Server:
    """Answers connections, each on a thread of its own, until closed."""

    def __init__(self, host: str, answer: Callable[[Line], None], seconds: float) -> None:
        """Listen at ``host``, at a port of the system's. Raises OSError.

        ``answer`` gets the line of each connection, whose every wait ends after ``seconds``.
        """
        self._listener = socket.create_server((host, 0), backlog=128)
        self._answer, self._seconds = answer, seconds
        self.address: Address = self._listener.getsockname()[:2]
        self._thread = Thread(target=self._serve, name="weights-server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the listening and every connection. Idempotent."""
        with suppress(OSError):
            # Closing alone would not wake the thread that waits for a connection.
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(self._seconds)

    def _serve(self) -> None:
        """Waits for connections; unblocked by them, and ended by `close`."""
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            connection.settimeout(self._seconds)
            Thread(target=self._attend, args=(Line(connection),), daemon=True).start()

    def _attend(self, line: Line) -> None:
        # Who asked is gone, or never meant to ask: whatever reaches this port may say anything.
        with closing(line), suppress(WireError, LookupError, TypeError, ValueError):
            self._answer(line)
