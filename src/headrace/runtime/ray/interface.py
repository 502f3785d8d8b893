"""Over which interface the ranks of a learner talk: the one that has the node's own address.

Left to themselves, gloo takes what the host's name resolves to, which is often the loopback
interface, and NCCL the first that it likes.
"""

from __future__ import annotations

import fcntl
import socket
import struct
from contextlib import suppress

_ADDRESS_OF = 0x8915
"""SIOCGIFADDR of Linux: the IPv4 address of an interface, as in netdevice(7)."""
_REQUEST = struct.Struct("16sH2x4s8x")
"""An interface's name; then the family of an address, and the address."""


def talking_over(address: str) -> dict[str, str]:
    """Return the variables that have gloo and NCCL talk over the interface with ``address``.

    Empty where none has it, as with addresses of IPv6: then both choose by themselves.
    """
    name = interface_with(address)
    # The sign has NCCL take this one, not every one whose name begins like this.
    return {} if name is None else {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"}


def interface_with(address: str) -> str | None:
    """Return the name of this machine's interface with the IPv4 ``address``; None without one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has none
                request = _REQUEST.pack(name.encode(), socket.AF_INET, bytes(4))
                answer = fcntl.ioctl(asking, _ADDRESS_OF, request + bytes(8))
                found = _REQUEST.unpack(answer[: _REQUEST.size])[2]
                if socket.inet_ntoa(found) == address:
                    return name
    return None
