"""The kernel's calls that Python has no function for, by ctypes.

Owns: a call that fails raises OSError with its name. Linux on x86-64 and arm64; elsewhere importing
it raises OSError. It decides nothing: `landlock`, `seccomp` and `namespaces` do.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass

_MACHINE = os.uname().machine if sys.platform == "linux" else sys.platform
_NUMBERS = {
    "x86_64": {
        "pivot_root": 155,
        "capset": 126,
        "chdir": 80,
        "clone": 56,
        "prctl": 157,
        "prlimit64": 302,
        "rt_sigaction": 13,
        "setgroups": 116,
        "setresgid": 119,
        "setresuid": 117,
        "setsid": 112,
    },
    "aarch64": {
        "pivot_root": 41,
        "capset": 91,
        "chdir": 49,
        "clone": 220,
        "prctl": 167,
        "prlimit64": 261,
        "rt_sigaction": 134,
        "setgroups": 159,
        "setresgid": 149,
        "setresuid": 147,
        "setsid": 157,
    },
}
_EVERYWHERE = {
    "open_tree": 428,
    "move_mount": 429,
    "close_range": 436,
    "mount_setattr": 442,
    "landlock_create_ruleset": 444,
    "landlock_add_rule": 445,
    "landlock_restrict_self": 446,
}

PR_SET_DUMPABLE = 4
PR_SET_SECCOMP = 22
PR_CAPBSET_DROP = 24
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38

_AT_FDCWD = -100
_AT_RECURSIVE = 0x8000
_OPEN_TREE_CLONE = 1
_MOVE_MOUNT_F_EMPTY_PATH = 4
_MNT_DETACH = 2
_CAPABILITY_VERSION_3 = 0x20080522
_NUM_CAPABILITIES = 64
_NEW_PROCESS_IDS = 0x20000000
DEFAULT_ACTION = bytes(32)
"""For `set_signal_action`."""

MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_NOATIME = 2, 4, 8, 0x400
MS_REC, MS_PRIVATE = 0x4000, 0x40000
ATTR_READ_ONLY, ATTR_NO_SUID, ATTR_NO_DEVICES = 1, 2, 4


def machine() -> str:
    """Return the processor's name as the tables of calls have it. Raises OSError if they don't."""
    if _MACHINE not in _NUMBERS:
        msg = f"calls of Linux on x86-64 and arm64 are known, not those of {_MACHINE}"
        raise OSError(msg)
    return _MACHINE


_CALLS = _NUMBERS[machine()] | _EVERYWHERE
_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
_libc_with_lock = ctypes.PyDLL(None, use_errno=True)
"""Calls of it keep the interpreter's lock, so a child of one finds it held by itself."""
_syscall = _libc_with_lock.syscall
_syscall.restype = ctypes.c_long


Argument = int | bytes | ctypes.Array[ctypes.c_char] | None


@dataclass(frozen=True, slots=True)
class Call:
    """A call that is made later, by a process that was forked in between.

    All that it needs is here already: whatever a new process writes to, be it a count of
    references, is a page that the kernel must copy for it, and that is most of what it costs.
    """

    name: str
    words: tuple[object, ...]
    """Its number and arguments, as ctypes takes them."""


def prepared(name: str, *arguments: Argument) -> Call:
    """Return a call to be made with `make`."""
    # Numbers are passed in full width: ctypes would pass 32 bits of them.
    wide = [ctypes.c_long(part) if isinstance(part, int) else part for part in arguments]
    return Call(name, (ctypes.c_long(_CALLS[name]), *wide))


def make(calls: Sequence[Call]) -> None:
    """Make ``calls`` in their order, up to one that fails. Raises OSError."""
    for step in calls:
        if _syscall(*step.words) < 0:
            _checked(step.name, -1)


def call(name: str, *arguments: Argument) -> int:
    """Make a call by its number and return its result. Raises OSError."""
    result: int = _libc.syscall(*prepared(name, *arguments).words)
    return _checked(name, result)


def fork() -> int:
    """Fork; return the child's process id, and 0 in it. Raises OSError.

    Without what `os.fork` does for programs with threads and for modules that ask to be told, which
    costs as much as all the rest of a small program: the process has one thread.
    """
    return _checked("fork", _libc_with_lock.fork())


def fork_first() -> int:
    """Fork into a new namespace of process ids; return the child's id, and 0 in it. Raises OSError.

    By its number: libc's own fork takes no flags. What that does beside, for the locks of other
    threads, is not needed here, and the id that libc keeps of a thread is set by the next fork.
    """
    flags = _NEW_PROCESS_IDS | signal.SIGCHLD
    return _checked("clone", _syscall(*prepared("clone", flags, 0, 0, 0, 0).words))


def signal_action(number: int) -> bytes:
    """Return what is done at a signal, as the kernel keeps it. Raises OSError."""
    found = buffer(DEFAULT_ACTION)
    call("rt_sigaction", number, None, found, 8)
    return found.raw


def set_signal_action(number: int, action: bytes) -> Call:
    """Return the call that sets it, without Python's knowing."""
    return prepared("rt_sigaction", number, action, None, 8)


def prctl(option: int, first: int | ctypes.Array[ctypes.c_char] = 0, second: object = 0) -> None:
    """Change something of this process. Raises OSError."""
    wide = [ctypes.c_ulong(part) if isinstance(part, int) else part for part in (first, second)]
    _checked(f"prctl({option})", _libc.prctl(option, *wide, ctypes.c_ulong(0), ctypes.c_ulong(0)))


def unshare(flags: int) -> None:
    """Leave the namespaces that ``flags`` name for new ones. Raises OSError."""
    _checked("unshare", _libc.unshare(flags))


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    """Mount a file system. Raises OSError."""
    arguments = (source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags))
    _checked(f"mount({target})", _libc.mount(*arguments, options.encode()))


def unmount(target: str) -> None:
    """Take the topmost mount off ``target``, whoever uses it. Raises OSError."""
    _checked(f"umount({target})", _libc.umount2(target.encode(), _MNT_DETACH))


def bind(source: str, target: str, attributes: int) -> None:
    """Show ``source`` and what is mounted below it at ``target`` too. Raises OSError.

    ``attributes`` are added to what each mount has: those that the source is locked to stay.
    """
    flags = _OPEN_TREE_CLONE | os.O_CLOEXEC | _AT_RECURSIVE
    tree = call("open_tree", _AT_FDCWD, source.encode(), flags)
    try:
        wanted = attributes.to_bytes(8, sys.byteorder) + bytes(24)
        # AT_EMPTY_PATH is 0x1000.
        call("mount_setattr", tree, b"", 0x1000 | _AT_RECURSIVE, wanted, len(wanted))
        call("move_mount", tree, b"", _AT_FDCWD, target.encode(), _MOVE_MOUNT_F_EMPTY_PATH)
    finally:
        os.close(tree)


def set_read_only(target: str) -> None:
    """Make the mount at ``target``, and none below it, read-only. Raises OSError."""
    wanted = ATTR_READ_ONLY.to_bytes(8, sys.byteorder) + bytes(24)
    call("mount_setattr", _AT_FDCWD, target.encode(), 0, wanted, len(wanted))


def close_all_from(first: int) -> Call:
    """Return the call that closes every descriptor from ``first`` on."""
    return prepared("close_range", first, 0xFFFFFFFF, 0)


def drop_bounding_set() -> None:
    """No program that is run from now on gains a capability. Raises OSError."""
    for capability in range(_NUM_CAPABILITIES):
        try:
            prctl(PR_CAPBSET_DROP, capability)
        except OSError as error:
            # Beyond the last one that this kernel has.
            if error.errno == errno.EINVAL:
                return
            raise


def drop_capabilities() -> Call:
    """Return the call that gives up every capability."""
    header = _CAPABILITY_VERSION_3.to_bytes(4, sys.byteorder) + bytes(4)
    return prepared("capset", header, bytes(24))


def buffer(content: bytes) -> ctypes.Array[ctypes.c_char]:
    """Return memory with ``content``, for a call that takes an address."""
    return ctypes.create_string_buffer(content, len(content))


def address(memory: ctypes.Array[ctypes.c_char]) -> int:
    """Return where ``memory`` lies; it must outlive the use."""
    return ctypes.addressof(memory)


def _checked(name: str, result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result
