"""Landlock: which files a program may touch, and whom it may signal, whatever its user may.

Owns: what this kernel can restrict is restricted; a ruleset names only what is allowed. See
landlock(7); the numbers are those of linux/landlock.h.
"""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Iterable

from headrace.verifiers.sandbox.inside import kernel
from headrace.verifiers.sandbox.inside.kernel import Call

_VERSION_FLAG = 1
_PATH_BENEATH = 1

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_TRUNCATE, _IOCTL_DEVICE = 1 << 14, 1 << 15
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEVICE
_MAKE_DEVICES = 1 << 6 | 1 << 11
_MAKE_SOCKET = 1 << 9
_ALL_SINCE = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}
"""Version -> the rights to files that it knows."""
_TCP = 3
_SCOPES = 3
"""Connections to abstract Unix sockets, and signals, that leave the domain."""

TCP_VERSION = 4
SCOPE_VERSION = 6

READ = _READ_FILE | _READ_DIR
EXECUTE = _EXECUTE
WRITE = ~(_EXECUTE | _MAKE_DEVICES | _MAKE_SOCKET | _IOCTL_DEVICE)
WRITE_FILE = _WRITE_FILE


def version() -> int:
    """Return the version of this kernel's Landlock; 0 where there is none."""
    try:
        return kernel.call("landlock_create_ruleset", None, 0, _VERSION_FLAG)
    except OSError:
        return 0


def ruleset(allowed: Iterable[tuple[str, int]]) -> int:
    """Return the descriptor of a ruleset that allows ``allowed``: pairs of path and rights.

    A path that does not exist is left out. Raises OSError.
    """
    files = _known_rights()
    ruleset = _create(files, _TCP)
    for path, rights in allowed:
        try:
            place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        try:
            is_folder = stat.S_ISDIR(os.fstat(place).st_mode)
            granted = rights & files & (-1 if is_folder else _OF_FILES)
            # Packed: eight bytes of rights, four of descriptor.
            rule = struct.pack("=Qi", granted, place)
            kernel.call("landlock_add_rule", ruleset, _PATH_BENEATH, rule, 0)
        finally:
            os.close(place)
    return ruleset


def scope_ruleset() -> int:
    """Return a ruleset that leaves files alone, and keeps signals inside. Raises OSError."""
    return _create(0, 0)


def restrict(ruleset: int) -> Call:
    """Return the call that restricts a process and all that come of it; needs no_new_privs."""
    return kernel.prepared("landlock_restrict_self", ruleset, 0)


def _create(files: int, network: int) -> int:
    found = version()
    attributes = struct.pack("=Q", files)
    if found >= TCP_VERSION:
        attributes += struct.pack("=Q", network)
    if found >= SCOPE_VERSION:
        attributes += struct.pack("=Q", _SCOPES)
    return kernel.call("landlock_create_ruleset", attributes, len(attributes), 0)


def _known_rights() -> int:
    found = version()
    return max(rights for since, rights in _ALL_SINCE.items() if since <= found)
