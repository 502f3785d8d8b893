"""The address of a Ray cluster, and whether something that could be one answers there.

Asked before Ray is: its own client waits forty seconds for an address that nobody answers.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass

from headrace.errors import ClusterError

AUTO = "auto"
PROBE_SECONDS = 5.0
"""For a connection, and as long again for the first answer."""

_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5)
"""How every HTTP/2 client begins (RFC 9113, 3.4): the preface, then an empty SETTINGS frame."""
_FRAME_HEAD = 9
_SETTINGS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where the head of a cluster answers."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


def find_address(text: str) -> Address | None:
    """Read ``text``; ``auto`` is what RAY_ADDRESS names, or None: the cluster of this machine.

    Raises ClusterError for what is no address.
    """
    if text == AUTO:
        named = os.environ.get("RAY_ADDRESS", AUTO)
        return None if named == AUTO else _parse(named, f"RAY_ADDRESS = {named!r}")
    return _parse(text, f"--address {text!r}")


def _parse(text: str, shown: str) -> Address:
    host, _, port = text.rpartition(":")
    if not host or "/" in host or not port.isdecimal() or not 0 < int(port) < 2**16:
        msg = (
            f"{shown}: must be HOST:PORT, as `ray start --head` prints it (the port is 6379 "
            'unless another was asked for), or "auto"'
        )
        raise ClusterError(msg)
    return Address(host=host.strip("[]"), port=int(port))


def probe(address: Address, timeout_seconds: float = PROBE_SECONDS) -> None:
    """Return if the head of a cluster may be at ``address``: something there speaks HTTP/2.

    Raises ClusterError within twice ``timeout_seconds``.
    """
    try:
        with socket.create_connection((address.host, address.port), timeout_seconds) as line:
            line.sendall(_HELLO)
            head = _receive(line)
    except OSError as error:
        msg = (
            f"--address {address}: no Ray cluster answers there within {timeout_seconds:g} s "
            f"({error}); start one with `ray start --head` on that machine, open the port to this "
            "one, or leave --address out for a Ray of this run's own"
        )
        raise ClusterError(msg) from error
    if len(head) < _FRAME_HEAD or head[3] != _SETTINGS:
        msg = (
            f"--address {address}: what answers there is not the head of a Ray cluster; give the "
            "address that `ray start --head` prints, which is not that of the dashboard (8265) or "
            "of Ray clients (10001)"
        )
        raise ClusterError(msg)


def _receive(line: socket.socket) -> bytes:
    """Return the head of the first frame, or less where the other side ends before it."""
    head = b""
    while len(head) < _FRAME_HEAD and (more := line.recv(_FRAME_HEAD - len(head))):
        head += more
    return head
