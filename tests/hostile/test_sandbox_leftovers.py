"""The directory of a job is kept where nobody touched it: what was touched must never be."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from sandbox_lab import here, make_pool, report, run

from headrace.verifiers.sandbox.execution import Ending, Tier
from headrace.verifiers.sandbox.pool import SandboxPool

_HOLD = """
import array, socket
def leave_in_flight(descriptor):
    pair = socket.socketpair()
    held = array.array("i", [descriptor, *(end.fileno() for end in pair)])
    for end in pair:
        end.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, held)])
"""
"""A socket that holds itself is no process's any more, and lives on with all that it holds."""

TRACES = {
    "nothing": "",
    "a file that is gone again": "import os\nopen('x', 'w').close()\nos.remove('x')",
    "a folder that was moved and is gone again": (
        "import os\nos.mkdir('x')\nos.rename('x', 'y')\nos.rmdir('y')"
    ),
    "a file that is gone again, with the times set back": (
        "import os\nopen('x', 'w').close()\nos.remove('x')\n"
        "try:\n    os.utime('.', (0, 0))\nexcept OSError:\n    pass"
    ),
    "its times": (
        "import os\ntry:\n    os.utime('.', (12345, 0))\nexcept OSError:\n    os.utime('.')"
    ),
    "that it was read": "import os\nos.listdir('.')",
    "a file without a name": (
        f"{_HOLD}import os\nplace = os.open('.', os.O_TMPFILE | os.O_RDWR)\n"
        "os.write(place, bytes(1 << 20))\nleave_in_flight(place)"
    ),
    "a lock": (
        f"{_HOLD}import fcntl, os\nplace = os.open('.', os.O_RDONLY)\n"
        "fcntl.flock(place, fcntl.LOCK_EX)\nleave_in_flight(place)"
    ),
    "a lock of an open file": (
        f"{_HOLD}import fcntl, os, struct\nplace = os.open('.', os.O_RDONLY)\n"
        "asked = struct.pack('@hhqqi', fcntl.F_RDLCK, 0, 0, 0, 0)\n"
        "fcntl.fcntl(place, fcntl.F_OFD_SETLK, asked)\nleave_in_flight(place)"
    ),
}

LOOK = """
import ctypes, fcntl, os, struct
place = os.open(".", os.O_RDONLY)
found, room = os.fstat(place), os.fstatvfs(place)
print(found.st_mtime_ns, found.st_atime_ns, found.st_nlink, oct(found.st_mode))
print(room.f_bfree, room.f_ffree)
try:
    fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    print("locked")
asked = struct.pack("@hhqqi", fcntl.F_WRLCK, 0, 0, 0, 0)
print(struct.unpack("@hhqqi", fcntl.fcntl(place, fcntl.F_OFD_GETLK, asked))[0])
open("a", "w").close()
# Where the directory goes on after each name: it counts the names that ever were in it.
names = ctypes.create_string_buffer(4096)
number = {"x86_64": 217, "aarch64": 61}[os.uname().machine]
size = ctypes.CDLL(None).syscall(ctypes.c_long(number), place, names, 4096)
print(names.raw[:size])
"""


@pytest.fixture(scope="module")
def pool() -> Iterator[SandboxPool]:
    if not here(Tier.CELL):
        pytest.skip(f"no cells here: {report(Tier.CELL).detail}")
    pool = make_pool(Tier.CELL)
    yield pool
    pool.close_blocking()


@pytest.fixture(scope="module")
def untouched() -> bytes:
    """What a program sees in a cell in which none has run before."""
    pool = make_pool(Tier.CELL)
    try:
        return run(pool, LOOK).stdout
    finally:
        pool.close_blocking()


@pytest.mark.parametrize("name", TRACES)
def test_no_program_sees_a_trace_of_the_one_before_in_its_directory(
    pool: SandboxPool, untouched: bytes, name: str
) -> None:
    left = run(pool, TRACES[name])
    assert left.ending is Ending.EXITED, left
    assert left.exit_status == 0, left.stderr
    found = run(pool, LOOK)
    assert found.exit_status == 0, found.stderr
    if os.geteuid() == 0:
        assert found.stdout == untouched
    # Who owns a file system's root finds in its times when it was mounted.
    assert found.stdout.splitlines()[1:] == untouched.splitlines()[1:]


def test_a_directory_that_no_program_has_touched_is_kept(pool: SandboxPool) -> None:
    """Mounting costs as much as a small program."""
    if os.geteuid() != 0:
        pytest.skip("a program that owns its directory could hide what it did there")
    made = "import os; print(os.stat('.').st_ctime_ns)"
    first = run(pool, made).stdout
    assert run(pool, made).stdout == first
    run(pool, "open('x', 'w')")
    assert run(pool, made).stdout != first
