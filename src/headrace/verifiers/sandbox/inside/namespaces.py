"""A cell's own world: users, processes, mounts, network, IPC and names; a root with little in it.

Owns: after `build_root` nothing of the host's file system is left but what was named, read-only;
there is no /proc, no device but four harmless ones, and the network has no interface that is up.
Works as root and as any user who may make user namespaces.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from headrace.verifiers.sandbox.inside import kernel

NOBODY = 65534
HOME = "/tmp"  # noqa: S108 - of the cell's own root: where a program works
_BASE = "/proc"
"""Where the new root grows; in the cell's own mounts, where nothing below it is wanted."""

_NEW_USER = 0x10000000
_NEW_OTHERS = 0x00020000 | 0x02000000 | 0x04000000 | 0x08000000 | 0x40000000
"""Mounts, cgroups, UTS, IPC, network."""

_FOLDERS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64")
_ETC = ("/etc/ld.so.cache", "/etc/localtime", "/etc/alternatives")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
SYSTEM = (*_FOLDERS, *_ETC, *_DEVICES)
"""What a program may read of any system."""


def leave() -> int:
    """Leave the host's namespaces, but for that of process ids. Return the user id of jobs.

    Root maps nobody too, so that a program is another user than the one who owns the cell.
    Raises OSError.
    """
    user, group = os.geteuid(), os.getegid()
    wide = user == 0 and has_user(NOBODY)
    helper, go = _start_mapper(user, group, wide=wide)
    kernel.unshare(_NEW_USER | _NEW_OTHERS)
    os.write(go, b"\n")
    os.close(go)
    _, status = os.waitpid(helper, 0)
    if status != 0:
        msg = "the user namespace's ids could not be mapped"
        raise OSError(msg)
    return NOBODY if wide else user


def build_root(shown: Sequence[str]) -> None:
    """Replace the root by one that holds the system's programs and ``shown``. Raises OSError."""
    kernel.mount("none", "/", "", kernel.MS_REC | kernel.MS_PRIVATE)
    flags = kernel.MS_NOSUID | kernel.MS_NODEV
    kernel.mount("root", _BASE, "tmpfs", flags, "size=1m,mode=755")
    _fill(_BASE, shown)
    os.chdir(_BASE)
    kernel.call("pivot_root", b".", b".")
    kernel.unmount(".")
    os.chdir("/")
    kernel.set_read_only("/")


def _fill(base: str, shown: Sequence[str]) -> None:
    for path in (*_FOLDERS, *_ETC, *shown):
        _show(path, base)
    Path(base + "/dev").mkdir()
    for device in _DEVICES:
        Path(base + device).touch()
        kernel.bind(device, base + device, kernel.ATTR_NO_SUID)
    Path(base + HOME).mkdir(exist_ok=True)
    # POSIX shared memory and semaphores, which live and die with the job's directory.
    Path(base + "/dev/shm").symlink_to(HOME)  # noqa: S108 - of the cell's own root


def _show(path: str, base: str) -> None:
    source, target = Path(path), Path(base + path)
    if target.exists() or not source.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_symlink():
        target.symlink_to(source.readlink())
        return
    if source.is_dir():
        target.mkdir()
    else:
        target.touch()
    attributes = kernel.ATTR_READ_ONLY | kernel.ATTR_NO_SUID | kernel.ATTR_NO_DEVICES
    kernel.bind(path, str(target), attributes)


def has_user(user: int) -> bool:
    """Whether there is such a user and group: a namespace made for a container may have few."""
    return all(_is_mapped(user, f"/proc/self/{kind}_map") for kind in ("uid", "gid"))


def _is_mapped(number: int, table: str) -> bool:
    for line in Path(table).read_text().splitlines():
        first, _, count = (int(part) for part in line.split())
        if first <= number < first + count:
            return True
    return False


def _start_mapper(user: int, group: int, *, wide: bool) -> tuple[int, int]:
    """Fork a process that maps this one's ids once it has left; return it and the pipe to say so.

    Only a process that stayed may map more than its own.
    """
    reader, writer = os.pipe()
    target = f"/proc/{os.getpid()}"
    helper = os.fork()
    if helper:
        os.close(reader)
        return helper, writer
    status = 1
    try:
        os.close(writer)
        if os.read(reader, 1):
            nobody = f"{NOBODY} {NOBODY} 1\n" if wide else ""
            if not wide:
                Path(f"{target}/setgroups").write_text("deny")
            Path(f"{target}/uid_map").write_text(f"{user} {user} 1\n{nobody}")
            Path(f"{target}/gid_map").write_text(f"{group} {group} 1\n{nobody}")
            status = 0
    finally:
        os._exit(status)
