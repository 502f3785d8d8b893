"""What one process of a program may use, and the rights it has left: none.

Owns: limits are set on both sides, soft and hard, so a program cannot raise them; time alone has
its hard limit a second later, for programs that handle the warning.
"""

from __future__ import annotations

import math
import os
import resource
import signal
import struct

from headrace.verifiers.sandbox.inside import kernel
from headrace.verifiers.sandbox.inside.kernel import Call
from headrace.verifiers.sandbox.inside.protocol import Terms

STACK_BYTES = 64 << 20
"""Of the first thread: deep recursion is common in honest programs."""
_NUM_FILES = 256
_NUM_SIGNALS = 128


Limits = list[tuple[int, tuple[int, int]]]
"""What is limited, and its soft and hard limit."""


def of_time(terms: Terms) -> Limits:
    """Return the limits of what each process uses of its own."""
    # A second late: whoever watches from outside is more exact, and counts all processes.
    seconds = math.ceil(terms.cpu_seconds) + 1
    return [_limit(resource.RLIMIT_CPU, seconds, seconds + 1)]


def of_size(terms: Terms, other_processes: int) -> Limits:
    """Return the other limits of a job's processes.

    ``other_processes``: those of this user that are no part of the job and count all the same.
    """
    wanted = [
        (resource.RLIMIT_FSIZE, terms.file_bytes),
        (resource.RLIMIT_NPROC, terms.num_processes + other_processes),
        (resource.RLIMIT_DATA, terms.data_bytes),
    ]
    if terms.address_space:
        wanted.append((resource.RLIMIT_AS, terms.address_space))
    return [_limit(what, most, most) for what, most in wanted]


def _limit(what: int, soft: int, hard: int) -> tuple[int, tuple[int, int]]:
    """Return a limit, not above what this process may have itself."""
    return what, _possible(what, soft, hard)


def applied(limits: Limits) -> list[Call]:
    """Return the calls that limit a process and what comes of it."""
    return [
        kernel.prepared("prlimit64", 0, what, struct.pack("=QQ", *both), None)
        for what, both in limits
    ]


def limit_always() -> None:
    """Set what is the same for every job: once, since later processes inherit it."""
    for what, most in (
        (resource.RLIMIT_NOFILE, _NUM_FILES),
        (resource.RLIMIT_SIGPENDING, _NUM_SIGNALS),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_RTPRIO, 0),
        (resource.RLIMIT_NICE, 0),
    ):
        resource.setrlimit(what, _possible(what, *_both(most)))
    # Its hard limit stays: honest programs raise the soft one, to what they take for unlimited.
    _, hard = resource.getrlimit(resource.RLIMIT_STACK)
    soft, _ = _possible(resource.RLIMIT_STACK, STACK_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_STACK, (soft, hard))
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def become(user: int) -> list[Call]:
    """Return the calls by which a process becomes ``user`` for good, without any right."""
    if os.getuid() == user:
        return [kernel.drop_capabilities()]
    # Of the calling thread alone, where libc would change all of them: the process has one.
    return [
        kernel.prepared("setgroups", 0, None),
        kernel.prepared("setresgid", user, user, user),
        kernel.prepared("setresuid", user, user, user),
        kernel.drop_capabilities(),
    ]


def _both(value: int) -> tuple[int, int]:
    return value, value


def _possible(what: int, soft: int, hard: int) -> tuple[int, int]:
    """Return both limits, lowered to what this process may set."""
    _, most = resource.getrlimit(what)
    if most == resource.RLIM_INFINITY:
        return soft, hard
    return min(soft, most), min(hard, most)
